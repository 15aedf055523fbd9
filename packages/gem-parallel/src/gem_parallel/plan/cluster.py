"""The cluster file: GPUs, how fast they run each part of the model, and the tiers of the network between them.

All rates are those of one GPU, in decimal units (GB = 1e9 bytes), and are meant as measured, not as printed on a data sheet.
"""

from __future__ import annotations

import tomllib
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from gem_core.config import FrozenConfig
from gem_core.config.explain import Origin, validate
from gem_core.errors import ConfigError
from gem_parallel.plan.network import Network

DEFAULT = "default"


class Mfu(FrozenConfig):
    """``[gpu.mfu]``: local MFU by part of the model, in (0, 1]: its FLOP/s when it runs alone on one GPU over the peak of the precision.

    The parts are those of ``gem_core.model.flops`` (events, pffn, attention, pooling, interaction, heads, ...); "default" is for others.
    """

    forward: dict[str, float]
    backward: dict[str, float]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("forward", "backward"):
            rates = getattr(self, name)
            if DEFAULT not in rates:
                raise ValueError(f"{name} needs a {DEFAULT!r} for the parts that it does not name")
            wrong = [part for part, rate in rates.items() if not 0 < rate <= 1]
            if wrong:
                raise ValueError(f"{name}.{wrong[0]} = {rates[wrong[0]]}: a share of the peak lies in (0, 1]")
        return self

    def of(self, part: str, *, backward: bool = False) -> float:
        rates = self.backward if backward else self.forward
        return rates.get(part, rates[DEFAULT])


class Width(FrozenConfig):
    """``[gpu.width]``: how the rates of ``[gpu.mfu]`` change with the model's width, that of its events (``model.sequence.dim``).

    ``reference``: the width at which they hold. ``speed.PART``: at the widths ``at``, over that at the reference; between them in the
    logarithm of the width, beyond them as at the last one. Parts without a curve keep their rate.
    """

    reference: int = Field(gt=0)
    at: tuple[int, ...] = ()
    speed: dict[str, tuple[float, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if list(self.at) != sorted(set(self.at)) or any(width <= 0 for width in self.at):
            raise ValueError("at needs ascending widths above 0")
        for part, speeds in self.speed.items():
            if not speeds or len(speeds) != len(self.at) or any(speed <= 0 for speed in speeds):
                raise ValueError(f"speed.{part} needs a number above 0 for each of the {len(self.at)} widths in at")
        return self

    def of(self, part: str, width: int) -> float:
        """Factor of the part's rates at ``width``; 1 for a model without one (0)."""
        if not width or part not in self.speed:
            return 1.0
        return float(np.interp(np.log(width), np.log(self.at), self.speed[part]))

    def beyond(self, width: int) -> bool:
        """Whether the rates at ``width`` are not known."""
        return bool(width) and width != self.reference and not (self.speed and self.at[0] <= width <= self.at[-1])


class Gpu(FrozenConfig):
    """``[gpu]``"""

    name: str = Field(min_length=1)
    memory_gb: float = Field(gt=0, description="what a process can allocate")
    reserved_gb: float = Field(3.0, ge=0, description="context, communication buffers, fragmentation")
    memory_gbs: float = Field(gt=0, description="copy rate of the memory, read + write, GB/s")
    row_efficiency: float = Field(0.5, gt=0, le=1, description="share of that rate which reads and updates of single table rows reach")
    plain_row_efficiency: float = Field(
        0.004, gt=0, le=1, description="the same for updates by the strategy local, which has no kernel of its own"
    )
    peak_tflops: dict[str, float] = Field(description='dense peak by precision: "fp32", "bf16"')
    speedup: dict[str, float] = Field(default_factory=dict, description="by recipe: how much faster than in bf16 its linear maps run")
    mfu: Mfu
    width: Width | None = Field(None, description="the model width at which the local MFU holds, and how it changes; none: at all widths")
    in_step: float = Field(1.0, gt=0, description="how much faster parts run within a step than alone, where their local MFU is measured")
    overhead_ms: float = Field(0.0, ge=0, description="a step's host time that nothing hides")
    launch_us: float = Field(
        0.0, ge=0, description="host time of one operation of the model in a step that is not captured; 0: the host is never waited for"
    )
    transient: float = Field(0.5, ge=0, description="memory of a layer while its backward runs, over what the layer had saved")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reserved_gb >= self.memory_gb:
            raise ValueError(f"reserved_gb {self.reserved_gb} leaves nothing of memory_gb {self.memory_gb}")
        for table, least in (("peak_tflops", 0.0), ("speedup", 0.0)):
            wrong = [key for key, value in getattr(self, table).items() if value <= least]
            if wrong:
                raise ValueError(f"{table}.{wrong[0]} must be above {least}")
        return self

    @property
    def usable(self) -> float:
        """Bytes that the model may use."""
        return (self.memory_gb - self.reserved_gb) * 1e9


class Tier(FrozenConfig):
    """``[[tiers]]``, innermost first. ``size`` domains of the tier below make one domain of this tier; for the first: GPUs a host."""

    name: str = Field(min_length=1)
    size: int = Field(gt=0)
    bandwidth_gbs: float = Field(gt=0, description="what one GPU sends and at the same time receives over this tier, GB/s")
    latency_us: float = Field(gt=0, description="one hop")
    oversubscription: float = Field(1.0, ge=1, description="factor by which the tier is too narrow for all GPUs at once")

    @property
    def rate(self) -> float:
        """Bytes/s of a GPU when all of them send."""
        return self.bandwidth_gbs * 1e9 / self.oversubscription


class Collectives(FrozenConfig):
    """``[collectives]``"""

    launch_us: float = Field(20.0, ge=0, description="fixed time of a collective")
    host_us: float = Field(
        0.0, ge=0, description="host time of gathering or reducing one sharded layer in a step that is not captured, copies included"
    )
    message_us: float = Field(1.0, ge=0, description="time of an all-to-all for each further peer")
    slowdown: float = Field(1.0, ge=1, description="factor by which concurrent computation is slowed (1: the collectives use no SM)")
    copy_engine: float | None = Field(
        None, gt=0, description="rate of gathers by copies inside a host over that of its tier; none: GPUs cannot read each other's memory"
    )


class Cluster(FrozenConfig):
    """The whole file."""

    name: str = Field(min_length=1)
    gpu: Gpu
    tiers: tuple[Tier, ...]
    collectives: Collectives = Collectives()

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [tier.name for tier in self.tiers]
        if not names:
            raise ValueError("no tier is given: add [[tiers]] with the GPUs of a host")
        if len(set(names)) < len(names):
            raise ValueError(f"two tiers have one name: {', '.join(names)}")
        return self

    @cached_property
    def domains(self) -> tuple[int, ...]:
        """GPUs of one domain of each tier."""
        return tuple(accumulate((tier.size for tier in self.tiers), lambda a, b: a * b))

    @cached_property
    def network(self) -> Network:
        return Network(
            tuple(tier.rate for tier in self.tiers),
            tuple(tier.latency_us * 1e-6 for tier in self.tiers),
            self.collectives.launch_us * 1e-6,
            self.collectives.message_us * 1e-6,
        )

    @property
    def gpus(self) -> int:
        return self.domains[-1]

    def check_world(self, world: int) -> None:
        """:raises ConfigError: the cluster has fewer GPUs, or there is none."""
        if not 0 < world <= self.gpus:
            sizes = " x ".join(f"{tier.size} ({tier.name})" for tier in self.tiers)
            raise ConfigError(
                f"a world of {world} processes does not fit on {self.gpus} GPUs = {sizes}",
                where="--world",
                fix="start fewer processes, or raise the size of the last of [[tiers]] in the cluster file",
            )

    def local_mfu(self, part: str, width: int = 0, *, backward: bool = False) -> float:
        """Local MFU of a part of a model whose events have ``width`` (0: it has none)."""
        factor = 1.0 if self.gpu.width is None else self.gpu.width.of(part, width)
        return self.gpu.mfu.of(part, backward=backward) * factor

    def flops(self, recipe: str) -> float:
        """FLOP/s at MFU 1 of linear maps under ``recipe``: the fp32 peak for "fp32", else that of bf16 times the recipe's speed-up.

        :raises ConfigError: the file does not state that peak.
        """
        precision = "fp32" if recipe == "fp32" else "bf16"
        if precision not in self.gpu.peak_tflops:
            raise ConfigError(
                f"the cluster file states no {precision} peak, which the recipe {recipe!r} is counted with",
                where="gpu.peak_tflops",
                fix=f"add {precision} = ... (dense TFLOP/s)",
            )
        return self.gpu.peak_tflops[precision] * 1e12 * self.gpu.speedup.get(recipe, 1.0)


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file.

    :raises ConfigError: it is missing, no TOML, or has unknown, missing or impossible values; the message names key, file and line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except OSError as fault:
        raise ConfigError(
            f"the cluster file cannot be read: {fault.strerror}", where=str(path), fix="pass a file like those of docs/examples/clusters"
        ) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise ConfigError(f"the cluster file is not valid TOML: {fault}", where=str(path), fix="correct the line") from None
    cluster: Cluster = validate(Cluster, data, (), Origin.of_text(text, str(path)))
    return cluster
