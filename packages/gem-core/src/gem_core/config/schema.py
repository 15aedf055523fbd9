"""The configuration: frozen nested models of the TOML file's sections.

Sections of plug-ins are validated in a second step by the ``config_type`` that the chosen plug-in registered: ``[data.<source>]``,
``[model]`` (all keys but ``name`` and ``preset``), ``[precision.<recipe>]``, ``[parallel.<strategy>]``, ``[train.callbacks.<callback>]``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, PrivateAttr

from gem_core.config.base import FrozenConfig
from gem_core.config.explain import Origin
from gem_core.config.features import Features


class PluginSection(FrozenConfig):
    """A section that also holds tables of plug-ins; they are kept as given until the plug-in's type validates them."""

    model_config = ConfigDict(frozen=True, extra="allow", validate_default=True)

    def options(self) -> dict[str, Any]:
        """The keys that this core does not know: tables of plug-ins."""
        return dict(self.model_extra or {})


class Run(FrozenConfig):
    """``[run]``: where and with what the run happens."""

    name: str = Field("run", min_length=1, description="also the name of its folder below dir")
    dir: str = Field("runs", description="run folders are created below this one")
    seed: int = Field(0, ge=0, le=2**62, description="of initial parameters, of dropout and of the order of the samples")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where a device is there")
    threads: int | None = Field(None, gt=0, le=1024, description="CPU threads of torch; None: leave it")


class TableSection(PluginSection):
    """A section whose further keys must be tables; a lone value there is a misspelt key."""

    __pydantic_extra__: dict[str, dict[str, Any]]


class Data(TableSection):
    """``[data]``: which source, and how batches are cut. The source's own options are in ``[data.<source>]``."""

    source: str = Field("synthetic", description="`gemrec plugins` lists those that are installed")
    batch_size: int = Field(512, gt=0, description="samples per batch and rank")
    eval_batch_size: int | None = Field(None, gt=0, description="None: batch_size")
    drop_last: bool = Field(False, description="drop a last partial training batch")


class Model(PluginSection):
    """``[model]``: which registered model, from which preset; all further keys are options of that model."""

    name: str = Field("gem", description="`gemrec plugins` lists those that are installed")
    preset: str | None = Field(
        None, description="sizes by name (tiny, small, base, base-window, large, xl), for the model gem; keys beside it go before"
    )


class Kernels(FrozenConfig):
    """``[kernels]``: "auto", or the name of an implementation; ``[kernels.ops]`` decides for single ops."""

    default: str = Field("auto", description="for every op that ops does not name; auto: the fastest that can do it")
    ops: dict[str, str] = Field(default_factory=dict)


class Precision(TableSection):
    """``[precision]``: the recipe; its options are in ``[precision.<recipe>]``."""

    recipe: str = Field("fp32", description="`gemrec plugins` lists those that are installed")


class Parallel(TableSection):
    """``[parallel]``: the mesh (degrees; -1: inferred) and the strategies; their options are in ``[parallel.<strategy>]``."""

    dense: str = Field("single", description="strategy of the dense part; `gemrec plugins` lists those that are installed")
    sparse: str = Field("local", description="strategy of the embedding tables, likewise")
    replicate: int = Field(1, description="dense part: copies")
    shard: int = Field(-1, description="dense part: processes that share a copy; replicate x shard x expert is the number of processes")
    expert: int = Field(1, description="dense part: processes that share the summed experts of a layer")
    model: int = Field(-1, description="tables: processes that share a copy; model x replica is the number of processes")
    replica: int = Field(1, description="tables: copies of a shard")
    timeout_s: float = Field(600.0, gt=0, description="seconds without progress after which a run of several processes ends")


class DenseOptimizer(FrozenConfig):
    """``[train.optimizer]``: AdamW for everything that is not an embedding table."""

    lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)


class TableOptimizer(FrozenConfig):
    """``[train.tables]``: row-wise AdaGrad, ``w_r -= lr * g_r / (sqrt(mean_d(g_r^2) accumulated) + eps)``; or AdamW with the options of
    ``[train.optimizer]``, which updates every row in every step and so is for small tables that each process holds whole."""

    kind: Literal["rowwise_adagrad", "adamw"] = "rowwise_adagrad"
    lr: float = Field(0.05, gt=0)
    eps: float = Field(1e-8, gt=0)
    initial_accumulator: float = Field(0.0, ge=0, description="of the squared gradients")
    evict_after: int | None = Field(
        None, gt=0, description="with a source that follows partitions: rows that no sample read for more than so many begin anew"
    )


class Schedule(FrozenConfig):
    """``[train.schedule]``: linear warm-up, then the decay down to ``final * lr``; applies to both optimizers."""

    warmup_steps: int = Field(0, ge=0, description="steps in which the learning rates rise from 0")
    decay: Literal["none", "linear", "cosine"] = "none"
    final: float = Field(0.0, ge=0, le=1, description="share of the learning rate that is left at the end of the decay")
    tables: bool = Field(True, description="whether the schedule also drives the table optimizer")


class Distill(FrozenConfig):
    """``[train.distill]``: an auxiliary head learns a larger model's predictions, and the trunk with it; see `gem_core.train.distill`."""

    teacher: dict[str, str] = Field(
        default_factory=dict, description="task -> column with the teacher's probability of it; 'gemrec distill' fills it in"
    )
    weight: float = Field(1.0, ge=0, description="of the auxiliary head's losses beside the labels'")
    alpha: float = Field(1.0, gt=0, description="the target is clip(alpha * probability, 0, 1): more than 1 where positives are rare")
    beta: float = Field(1.0, ge=0, description="factor of the auxiliary head's gradient where it enters the trunk")
    hidden: tuple[int, ...] = Field((64,), description="widths of the auxiliary head")
    adapter: bool = Field(True, description="also learn the teacher's prediction corrected to the fresh labels")
    adapter_hidden: tuple[int, ...] = (16,)


class Train(FrozenConfig):
    """``[train]``: length of the run, optimizers, checkpoints, logs."""

    steps: int | None = Field(None, gt=0, description="optimizer steps; None: `epochs` decides")
    epochs: int = Field(1, gt=0, description="passes over the training data, where steps is not set")
    accumulate: int = Field(1, gt=0, description="micro-batches an optimizer step")
    clip_norm: float | None = Field(None, gt=0, description="global norm limit of the dense gradients")
    compile: bool = Field(False, description="torch.compile the model layer by layer (lookups stay eager)")
    capture: bool = Field(
        False, description="record the step as CUDA graphs for each of a few sizes of batch and replay them; tables of any strategy"
    )
    nonfinite: Literal["stop", "skip"] = Field("stop", description="what a non-finite loss does; a skipped step touches no parameter")
    optimizer: DenseOptimizer = DenseOptimizer()
    tables: TableOptimizer = TableOptimizer()
    schedule: Schedule = Schedule()
    log_every: int = Field(50, gt=0, description="steps between lines of the log")
    checkpoint_every: int | None = Field(None, gt=0, description="steps between checkpoints; the final one is always written")
    checkpoint_async: bool = Field(False, description="copy the state and write it while training goes on; costs host memory for the copy")
    keep_checkpoints: int = Field(2, gt=0, description="the newest that stay; the best one stays as well, with eval.restore_best")
    tensorboard: bool = Field(True, description="write TensorBoard files where the package is installed")
    warm_start: str | None = Field(
        None, description="run folder whose newest checkpoint a new run begins with: parameters, tables, which may have grown, optimizers"
    )
    distill: Distill | None = None
    callbacks: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Ranking(FrozenConfig):
    """``[eval.ranking]``: how retrieval is evaluated; every item is ranked for every history, and equal scores count one half.

    ``seen``: items that the history (or ``features.next_item.seen``) holds. "mask": they are not found, not even as the right answer;
    "filter": they leave the ranking, but the right answer never does; "keep": they are items like others.
    """

    k: tuple[int, ...] = Field((1, 5, 10, 50), min_length=1, description="cut-offs of hit rate and NDCG")
    seen: Literal["mask", "filter", "keep"] = "mask"
    item_chunk: int = Field(65_536, gt=0, description="items scored at a time")


class Eval(FrozenConfig):
    """``[eval]``: when and how the model is evaluated; metrics are pooled over the whole evaluation set."""

    every: int | None = Field(None, gt=0, description="steps between evaluations; the final one is always made")
    max_batches: int | None = Field(None, gt=0, description="of an evaluation; None: the whole split")
    metrics: tuple[str, ...] = Field(
        ("ne", "auc", "logloss", "calibration", "gauc"), description="`gemrec plugins` lists those that are installed"
    )
    group: str | None = Field(None, description="column or sparse feature that groups samples for GAUC")
    patience: int | None = Field(
        None, gt=0, description="stop after this many evaluations without a better `monitor`; those in which it is undefined do not count"
    )
    monitor: str | None = Field(
        None, description="metric of the first task, as METRIC or TASK.METRIC; None: ne, for retrieval ndcg@10 (or of the first k)"
    )
    restore_best: bool = Field(False, description="final evaluation and final checkpoint use the best parameters seen")
    before_training: bool = Field(
        False, description="with a source that follows partitions: evaluate each new partition, then train on it (progressive validation)"
    )
    ranking: Ranking = Ranking()


class Config(FrozenConfig):
    """The whole file."""

    _origin: Origin = PrivateAttr(default_factory=Origin)

    run: Run = Run()
    data: Data = Data()
    features: Features = Features()
    model: Model = Model()
    kernels: Kernels = Kernels()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    train: Train = Train()
    eval: Eval = Eval()
    plan: dict[str, Any] = Field(
        default_factory=dict, description="what a planner predicted for this file; kept with the run, else not read"
    )

    @property
    def origin(self) -> Origin:
        """Where each key was written; for messages."""
        return self._origin

    def with_origin(self, origin: Origin) -> Config:
        copy = self.model_copy()
        copy._origin = origin
        return copy
