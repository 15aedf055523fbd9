"""Named sizes of the GEM model, each with the features, history lengths and batch size that its parameter and FLOP counts refer to.

``python -m gem_core.model.presets [NAME ...]`` prints the counts.
"""

from __future__ import annotations

import math
import sys
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_core.config.features import Features
from gem_core.errors import ConfigError
from gem_core.model.config import GemConfig
from gem_core.model.flops import ModelFlops

TASKS = {"ctr": {}, "cvr": {"mask": "clicked"}}


@dataclass(frozen=True)
class Preset:
    """``model`` is the ``[model]`` table. ``features`` is the reference log: ``tables`` tables of ``rows`` rows, one sparse feature each,
    and one history whose first ``fields`` id fields share their tables. Lengths are log-normal with sigma 1, cut at ``max_length``."""

    model: dict[str, Any]
    tables: int
    rows: int
    fields: int
    mean_length: float
    max_length: int
    batch_size: int

    def features(self) -> Features:
        names = [f"f{i:03d}" for i in range(self.tables)]
        events = names[: self.fields]
        return Features.model_validate(
            {
                "timestamp": "time",
                "tables": {n: {"rows": self.rows} for n in names},
                "sparse": {n: {"table": n} for n in names},
                "dense": {f"x{i}": {} for i in range(8)},
                "sequences": {
                    "history": {
                        "fields": {f"event_{n}": {"table": n} for n in events},
                        "timestamps": "event_times",
                        "max_length": self.max_length,
                        "target": {f"event_{n}": n for n in events},
                    }
                },
                "labels": TASKS,
            }
        )

    def lengths(self, samples: int = 4096) -> Tensor:
        """``[samples]`` int64: the quantiles of the length law, so that counts need no random draw."""
        place = (torch.arange(samples, dtype=torch.float64) + 0.5) / samples
        normal = math.sqrt(2.0) * torch.erfinv(2 * place - 1)
        return torch.exp(normal + math.log(self.mean_length) - 0.5).round().clamp(max=self.max_length).long()


_BASE: dict[str, Any] = {
    "layers": 6,
    "dim": 192,
    "embedding_dim": 128,
    "feature_tokens": 128,
    "dense_hidden": 256,
    "sequence": {
        "dim": 512,
        "heads": 4,
        "attention": "full",
        "event": {"time_buckets": 64},
        "pffn": {"kind": "norm_gdpa"},
        "pooling": {"seeds": 32},
    },
    "interaction": {
        "experts": ["wukong"] * 2,
        "tokens": 128,
        "summary": 96,
        "wukong": {"fm_tokens": 64, "rank": 24, "hidden": 1024},
    },
    "head": {"tokens": 8, "shared": 1024, "hidden": [512]},
}


def _over(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy of ``base`` with ``section__key=value`` replaced."""
    result = deepcopy(base)
    for path, value in changes.items():
        *sections, key = path.split("__")
        node = result
        for section in sections:
            node = node[section]
        node[key] = value
    return result


_LARGE = _over(
    _BASE,
    layers=12,
    dim=256,
    feature_tokens=256,
    sequence__dim=1024,
    sequence__heads=8,
    interaction__experts=["wukong"] * 4,
    interaction__tokens=192,
    interaction__summary=160,
    interaction__wukong__fm_tokens=96,
)
PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        {
            "layers": 2,
            "dim": 32,
            "embedding_dim": 32,
            "sequence": {
                "dim": 32,
                "heads": 2,
                "attention": "causal",
                "candidate": True,
                "event": {"compare": True, "time_buckets": 32, "positions": 64},
                "pooling": {"seeds": 2, "candidate_queries": 2},
            },
            "interaction": {"tokens": 8, "wukong": {"rank": 8, "hidden": 64}},
            "head": {"hidden": [64]},
        },
        tables=8, rows=10_000, fields=3, mean_length=40, max_length=2048, batch_size=512,
    ),
    "small": Preset(
        {
            "layers": 3,
            "dim": 64,
            "embedding_dim": 64,
            "sequence": {
                "dim": 128,
                "heads": 4,
                "attention": "causal",
                "candidate": True,
                "event": {"compare": True, "time_buckets": 64, "positions": 64},
                "pooling": {"seeds": 8, "candidate_queries": 4},
            },
            "interaction": {"tokens": 32, "experts": ["wukong", "wukong"], "wukong": {"rank": 16, "hidden": 256}},
            "head": {"tokens": 16, "hidden": [256, 64]},
        },
        tables=16, rows=100_000, fields=4, mean_length=120, max_length=4096, batch_size=1024,
    ),
    "base": Preset(_BASE, tables=32, rows=1_000_000, fields=4, mean_length=500, max_length=4096, batch_size=512),
    "base-window": Preset(
        _over(_BASE, sequence__attention=["window", "block"]),
        tables=32, rows=1_000_000, fields=4, mean_length=500, max_length=4096, batch_size=512,
    ),
    "large": Preset(_LARGE, tables=64, rows=2_000_000, fields=4, mean_length=500, max_length=4096, batch_size=256),
    "xl": Preset(
        _over(_LARGE, layers=24, sequence__dim=2048, sequence__heads=16, interaction__experts=["wukong"] * 8),
        tables=256, rows=30_500_000, fields=4, mean_length=500, max_length=4096, batch_size=256,
    ),
}  # fmt: skip


def find(name: str) -> Preset:
    """The preset called ``name``.

    :raises ConfigError: there is none.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}", where="model.preset", fix=f"choose one of: {', '.join(PRESETS)}")
    return PRESETS[name]


def preset(name: str) -> dict[str, Any]:
    """The ``[model]`` table of a preset, which the keys of a configuration file override.

    :raises ConfigError: an unknown name.
    """
    return deepcopy(find(name).model)


@dataclass(frozen=True)
class Counts:
    """Parameters and FLOPs a sample of a preset on its reference log. ``dense`` is by part; FLOPs are means over the length law."""

    sparse: int
    dense: dict[str, int]
    flops: ModelFlops
    samples: int

    @property
    def dense_total(self) -> int:
        return sum(self.dense.values())

    def table(self) -> str:
        """Aligned text: parameters and forward FLOPs a sample by part, with totals."""
        parts = dict.fromkeys((*self.dense, *self.flops.parts))
        lines = [f"{'part':14}{'parameters':>16}{'MFLOP forward':>16}", f"{'tables':14}{self.sparse:>16,}{'':>16}"]
        for part in parts:
            lines.append(f"{part:14}{self.dense.get(part, 0):>16,}{self.flops.parts.get(part, 0) / self.samples / 1e6:>16,.3f}")
        lines.append(f"{'dense total':14}{self.dense_total:>16,}{self.flops.forward / self.samples / 1e6:>16,.3f}")
        lines.append(f"{'training':14}{'':>16}{self.flops.training / self.samples / 1e6:>16,.3f}")
        return "\n".join(lines)


def counts(name: str, samples: int = 4096) -> Counts:
    """Parameters and FLOPs of a preset; builds the model without allocating it."""
    from gem_core.model.gem import Gem

    chosen = find(name)
    with torch.device("meta"):
        model = Gem(GemConfig.model_validate(chosen.model), chosen.features())
    lengths = chosen.lengths(samples)
    return Counts(model.table_set.parameters, dense_parameters(model), model.count_flops({"history": lengths}, samples), samples)


def dense_parameters(model: torch.nn.Module) -> dict[str, int]:
    """Parameters outside the tables of a `Gem` by part, under the names that `gem_flops` uses."""
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        head, *rest = name.split(".")
        if head == "tables":
            continue
        if head == "layers":
            kind = next(k for k in ("pffn", "attention", "ffn") if k in rest) if rest[1] == "blocks" else rest[1]
            part = {"pools": "pooling", "interaction": "interaction", "mix": "interaction", "gates": "interaction"}.get(kind, kind)
        else:
            part = {"entries": "events"}.get(head, head)
        parts[part] = parts.get(part, 0) + parameter.numel()
    return parts


if __name__ == "__main__":
    for chosen_name in sys.argv[1:] or PRESETS:
        print(f"{chosen_name}\n{counts(chosen_name).table()}\n")
