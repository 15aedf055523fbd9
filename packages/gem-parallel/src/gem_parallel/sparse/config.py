"""Options of the sparse strategies."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gem_core.config import FrozenConfig

Dtype = Literal["fp32", "fp16", "bf16"]
Placement = Literal["hbm", "uvm", "uvm_caching"]


class TableOptions(FrozenConfig):
    """``[parallel.<strategy>.tables.NAME]``: what differs for one table; None: as the strategy says for all."""

    sharding: Literal["auto", "row", "table", "column", "data"] | None = None
    placement: Placement | None = None
    dtype: Dtype | None = None
    ids: Literal["hash", "zch"] | None = None


class SparseConfig(FrozenConfig):
    """What all strategies of this package share."""

    dtype: Dtype | None = Field(None, description="of all tables; None: as the table says. Updates of fp16 and bf16 round stochastically")
    placement: Literal["auto", "hbm", "uvm", "uvm_caching"] = Field(
        "hbm", description='where tables live on CUDA: device memory, host memory, host memory with a device cache; "auto": by hbm_gb'
    )
    hbm_gb: float | None = Field(None, gt=0, description='device memory for tables a rank, for placement = "auto"; None: 60 % of it')
    cache_fraction: float = Field(0.2, gt=0, le=1, description="share of the rows that a uvm_caching table keeps on the device")
    tables: dict[str, TableOptions] = Field(default_factory=dict)


class _OutputConfig(SparseConfig):
    output: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="of looked-up rows and their gradients, also on their way between processes; bf16 halves what they cost where products "
        "in bf16 read them. Sums, updates and optimizer state stay fp32",
    )


class FbgemmConfig(_OutputConfig):
    """``[parallel.fbgemm]``: one process, FBGEMM's table kernels with the optimizer in backward."""


class Gem2dConfig(_OutputConfig):
    """``[parallel.gem-2d]``"""

    schedule: Literal["article", "torchrec"] = Field(
        "article",
        description="article: gather before forward and before backward, reduce-scatter after backward; "
        "torchrec: gather before backward, reduce-scatter after the next forward",
    )
    exchange: Literal["whole", "touched"] = Field("whole", description="what travels between replicas: all rows, or those used this step")
    kernel: Literal["auto", "fbgemm", "torch"] = Field("auto", description="auto: FBGEMM for fp32 and fp16 tables on CUDA, PyTorch else")
    sharding: Literal["auto", "row", "table"] = Field("auto", description="over the model axis; auto: rows where a table is large")
    unit_mb: int = Field(1024, gt=0, description="tables of one width are gathered in units of about this size")
    chunks: int = Field(1, gt=0, description="row chunks in which a unit's collectives are issued; more: shorter ones, and more of them")
    window: int = Field(2, gt=0, description="full copies that may exist at once under the article's schedule")
    ctas: int | None = Field(
        None, gt=0, le=32, description="most SMs that a gather or reduce-scatter between replicas takes; few leave more to the dense part"
    )
    collective: str = Field(
        "default",
        description="back end of gathers between replicas: default; low-cta; copy-engine (copies between the GPUs of a host, no SM)",
    )
    per_host: int | None = Field(None, gt=0, description="processes that count as one host for collective; None: by the hosts' names")
    momentum_scale: float | None = Field(
        None, gt=0, description="c of the momentum-scaled row-wise AdaGrad; None: the number of replicas for whole, 1 for touched"
    )


class TorchrecConfig(SparseConfig):
    """``[parallel.torchrec]``"""

    sharding: Literal["planner", "row", "table", "column", "data"] = Field("planner", description="planner: TorchRec's planner chooses")
    weighted: bool = Field(False, description="bags carry per-id weights")
    column_parts: int = Field(2, gt=1, description="parts of a column-wise table")
    zch_interval: int = Field(
        1000,
        gt=0,
        description='ids = "zch": steps between evictions; a resumed run counts them anew, and knows the ids of steps up to the last one',
    )


class Torchrec2dConfig(TorchrecConfig):
    """``[parallel.torchrec-2d]``: CUDA only."""

    fully_sharded: bool = Field(False, description="TorchRec's FULLY_SHARDED; else replicas are averaged every sync_every steps")
    sync_every: int = Field(1, gt=0, description="steps between averages of weights and optimizer state over the replicas")
    inter_host: bool = Field(False, description="consecutive ranks form a sharding group; replicas are averaged between hosts")
