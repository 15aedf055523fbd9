"""The rows of the attention benchmark: shapes, length laws, options, and the tensors of a row.

Law "s" (AMKL's generator): lengths are whole numbers, uniform in [(2s - 1)·L, L] for s >= 0.5 and in [1, 2s·L] below, at least 1. s = 1 is
dense. FLOPs of the forward pass: 2·H·(D + Dv) an attended pair of the true lengths; backward 2.5 times that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gem_core.jagged import lengths_to_offsets
from gem_core.ops import masks
from gem_core.ops.contract import OpPrecision, Problem
from gem_core.ops.contracts import GDPA


@dataclass(frozen=True)
class Row:
    """``q`` and ``k`` are (longest, sparsity); ``k`` None: the keys have the queries' lengths. With ``broadcast`` q is one for all.

    ``precisions`` are timed too where the run takes the implementation that a call would. ``least`` (TFLOP/s), ``most_ms`` and ``like`` (a
    share of another row's rate) are goals of forward and backward, see `attention_goals`; without ``floors`` the peers alone set them.
    ``recorded`` is the forward rate of ads_mkl's Triton GDPA, which is not installable, on a card of 680 TFLOP/s. Rows of one ``group``
    are timed in the same rounds, because they are compared: the clock falls within a second of such work.
    """

    name: str
    q: tuple[int, float]
    k: tuple[int, float] | None = None
    batch: int = 1152
    heads: int = 4
    dim: int = 128
    ops: tuple[str, ...] = ("jagged_attention", "gdpa")
    activation: str = "fast_gelu"
    causal: bool = False
    window: tuple[int, int] | None = None
    broadcast: bool = False
    bias: tuple[int, int] | None = None
    targets: int = 0
    peers: tuple[str, ...] = ("varlen_attn", "fa4")
    precisions: tuple[str, ...] = ()
    least: tuple[float, float] | None = None
    most_ms: tuple[float, float] | None = None
    like: tuple[str, float] | None = None
    floors: bool = True
    recorded: float | None = None
    group: str | None = None


_SOFTMAX = ("varlen_attn", "fa4", "cudnn_padded")

ROWS = (
    Row("self-1024-s0.5", (1024, 0.5), peers=(*_SOFTMAX, "fbgemm_jfa"), recorded=357),
    Row("self-1024-s1", (1024, 1.0), peers=(*_SOFTMAX, "fbgemm_jfa"), recorded=415, precisions=("fp8", "mxfp8")),
    Row("self-256-s0.5", (256, 0.5), peers=(*_SOFTMAX, "fbgemm_jfa"), recorded=50),
    Row("self-2048-s0.5", (2048, 0.5), peers=_SOFTMAX, recorded=419),
    Row("cross-1024x256-s1", (1024, 1.0), (256, 1.0), peers=_SOFTMAX, recorded=302),
    Row("cross-1024x128-s0.5", (1024, 0.5), (128, 1.0), peers=_SOFTMAX),
    Row("cross-1024x32-s0.5", (1024, 0.5), (32, 1.0), peers=_SOFTMAX, recorded=48),
    Row("pma-32x4096-s0.5", (32, 1.0), (4096, 0.5), broadcast=True, peers=(), least=(109, 111)),
    Row("pma-32x4096-s0.1", (32, 1.0), (4096, 0.1), broadcast=True, peers=(), least=(105, 107)),
    Row("pma-128x4096-s0.5", (128, 1.0), (4096, 0.5), broadcast=True, peers=(), least=(330, 280)),
    Row(
        "window128-4096",
        (4096, 1.0),
        batch=128,
        window=(128, 128),
        peers=("varlen_attn", "fa4"),
        most_ms=(1.0, 2.33),
        group="windows",
    ),
    Row(
        "window256-4096",
        (4096, 1.0),
        batch=128,
        window=(256, 256),
        ops=("jagged_attention",),
        peers=("varlen_attn",),
        floors=False,
        group="windows",
    ),
    Row("window128-8192", (8192, 1.0), batch=128, window=(128, 128), ops=("jagged_attention",), peers=(), group="windows"),
    Row("hstu-4099-d256", (4099, 1.0), batch=32, dim=256, ops=("gdpa",), activation="silu", causal=True, peers=(), least=(561, 336)),
    Row("causal-1024-s0.5", (1024, 0.5), causal=True, activation="silu", floors=False, group="causal"),
    Row(
        "causal-bias-targets-1024-s0.5",
        (1024, 0.5),
        causal=True,
        activation="silu",
        bias=(512, 32),
        targets=64,
        peers=(),
        like=("causal-1024-s0.5", 0.7),
        group="causal",
    ),
    Row("flex-1024-s0.5-b128", (1024, 0.5), batch=128, ops=("jagged_attention",), peers=("varlen_attn", "flex"), floors=False),
    Row("self-1024-s0.5-d64", (1024, 0.5), heads=8, dim=64, peers=("varlen_attn",), floors=False),
    Row(
        "causal-200-s0.3-d32",
        (200, 0.3),
        batch=4096,
        heads=2,
        dim=32,
        causal=True,
        activation="silu",
        peers=("varlen_attn",),
        floors=False,
    ),
)


def lengths(batch: int, longest: int, sparsity: float, generator: torch.Generator) -> Tensor:
    """``[B]`` int64 lengths after the law of the module's docstring."""
    low, high = (1, 2 * sparsity * longest) if sparsity < 0.5 else ((2 * sparsity - 1) * longest, longest)
    return torch.randint(max(1, round(low)), max(1, round(high)) + 1, (batch,), generator=generator)


class Data:
    """Tensors of a row on ``device``, by the contract's names, and its counts. Times ascend with random gaps, as events do."""

    def __init__(self, row: Row, device: torch.device | str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        host = torch.Generator().manual_seed(seed)
        on_device = torch.Generator(device).manual_seed(seed)
        self.row = row
        self.q_lengths = lengths(row.batch, *row.q, host)
        self.k_lengths = self.q_lengths if row.k is None else lengths(row.batch, *row.k, host)
        self.targets = torch.minimum(torch.full_like(self.q_lengths, row.targets), self.q_lengths) if row.targets else None
        q_rows = row.q[0] if row.broadcast else int(self.q_lengths.sum())
        k_rows = int(self.k_lengths.sum())

        def rows(n: int) -> Tensor:
            return torch.randn(n, row.heads, row.dim, device=device, dtype=dtype, generator=on_device)

        t: dict[str, Tensor | None] = dict.fromkeys(GDPA.tensors)
        t["q"], t["k"], t["v"] = rows(q_rows), rows(k_rows), rows(k_rows)
        t["k_offsets"] = lengths_to_offsets(self.k_lengths).to(device, torch.int32)
        if not row.broadcast:
            t["q_offsets"] = t["k_offsets"] if row.k is None else lengths_to_offsets(self.q_lengths).to(device, torch.int32)
        if self.targets is not None:
            t["num_targets"] = self.targets.to(device, torch.int32)
        if row.bias is not None:
            radius, buckets = row.bias
            t["bias_position"] = 0.1 * torch.randn(row.heads, 2 * radius + 1, device=device, generator=on_device)
            t["bias_time"] = 0.1 * torch.randn(row.heads, buckets, device=device, generator=on_device)
            t["bias_time_edges"] = torch.logspace(0, 20, buckets - 1, base=2.0).long().to(device)
            t["bias_q_times"] = t["bias_k_times"] = torch.randint(1, 2000, (q_rows,), generator=host).cumsum(0).to(device)
        self.tensors = t
        out_rows = row.q[0] * row.batch if row.broadcast else q_rows
        self.dout = torch.randn(out_rows, row.heads, row.dim, device=device, dtype=dtype, generator=on_device)
        self.pairs = int(self.pair_counts().sum())

    def pair_counts(self) -> Tensor:
        """``[B]`` attended pairs."""
        row = self.row
        q_lengths = torch.full_like(self.k_lengths, row.q[0]) if row.broadcast else self.q_lengths
        return masks.attended_pairs(q_lengths, self.k_lengths, num_targets=self.targets, causal=row.causal, window=row.window)

    def flops(self, backward: bool) -> float:
        return 4.0 * self.row.heads * self.row.dim * self.pairs * (2.5 if backward else 1.0)

    def least_bytes(self, softmax: bool, backward: bool) -> int:
        """Each tensor that is needed read once and each result written once: q, k, v, o; backward also dO, dq, dk, dv and for softmax o."""
        t = self.tensors
        size = lambda x: x.numel() * x.element_size()  # noqa: E731
        q, kv, o = size(t["q"]), size(t["k"]) + size(t["v"]), size(self.dout)
        return 2 * (q + kv) + o + (o if softmax else 0) if backward else q + kv + o

    def problem(self, op: str, precision: OpPrecision | None = None) -> Problem:
        """What the op's frontend would make of the row."""
        row, t = self.row, self.tensors
        power = lambda n: 1 << (n - 1).bit_length()  # noqa: E731
        options = {
            "causal": row.causal, "window": row.window, "broadcast_q": row.broadcast,
            "max_q_len": power(row.q[0]), "max_k_len": power((row.k or row.q)[0]),
        }  # fmt: skip
        if op == "gdpa":
            options |= {"activation": row.activation, "scale_in": row.dim**-0.5, "scale_out": 1.0}
        else:
            options |= {"scale": row.dim**-0.5, "out_scale": 1.0, "return_lse": False}
        dims = (("H", row.heads), ("Hkv", row.heads), ("D", row.dim), ("Dv", row.dim))
        device = t["q"].device
        arch = None
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            arch = 10 * major + minor
        present = frozenset(n for n in GDPA.tensors if t[n] is not None and n in GDPA.optional)
        dtypes = tuple((n, t[n].dtype) for n in GDPA.tensors if t[n] is not None)
        return Problem(
            op, device.type, arch, dtypes, (*dims, ("Lq", row.q[0])) if row.broadcast else dims, tuple(sorted(options.items())), present,
            precision, needs_grad=True,
        )  # fmt: skip


def small(row: Row) -> Row:
    """The same problem with so few samples that it only serves to compile its kernels."""
    return replace(row, batch=2)
