"""What is known of a call from its problem alone: the constants of its kernels, and the facts a configuration is chosen by."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from gem_core.ops.contract import Problem
from gem_kernels.triton.attention import activations
from gem_kernels.triton.common.configs import Facts

UNBOUNDED = 1 << 30
_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Plan:
    """Constants of one problem. ``scale`` multiplies Q Kᵀ, ``out_scale`` the result; ``activation`` has one name or one a head."""

    softmax: bool
    heads: int
    kv_heads: int
    d: int
    dv: int
    scale: float
    out_scale: float
    activation: str | tuple[str, ...]
    causal: bool
    window: bool
    left: int
    right: int
    targets: bool
    context: bool
    bias: bool
    time: bool
    shared: bool
    broadcast: bool
    q_bound: int
    k_bound: int
    dtype: str
    deterministic: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def d_pad(self) -> int:
        return max(16, 1 << (self.d - 1).bit_length())

    @property
    def dv_pad(self) -> int:
        return max(16, 1 << (self.dv - 1).bit_length())

    @property
    def mask(self) -> str:
        """Kind of mask for the configuration tables; candidates change the visible keys of "full" only in number."""
        return "window" if self.window else "causal" if self.causal else "full"

    @property
    def plain(self) -> bool:
        """Every query row of a sample sees every key of it, without bias, each sample with keys of its own."""
        return self.simple and self.mask == "full"

    @property
    def simple(self) -> bool:
        """No candidates, no bias, and each sample with keys of its own."""
        return not (self.targets or self.bias or self.shared)

    @property
    def band(self) -> int:
        """Keys in a row's window, rounded up to a power of two; 0 without a window."""
        if not self.window:
            return 0
        keys = min(self.left, self.k_bound) + (0 if self.causal else min(self.right, self.k_bound)) + 1
        return 1 << (keys - 1).bit_length()

    @functools.cached_property
    def facts(self) -> Facts:
        op = "softmax" if self.softmax else self.activation if isinstance(self.activation, str) else "mixed"
        facts = {
            "op": op, "dtype": self.dtype, "d": self.d_pad, "dv": self.dv_pad, "group": self.group, "mask": self.mask, "band": self.band,
            "bias": self.bias, "time": self.time, "targets": self.targets, "shared": self.shared, "broadcast": self.broadcast,
            "q": min(self.q_bound, 1 << 16), "k": min(self.k_bound, 1 << 16),
        }  # fmt: skip
        return tuple(sorted(facts.items()))

    @functools.cached_property
    def folded_gain(self) -> float:
        """What the kernels' folded activation leaves to the epilogue (`activations.gain`)."""
        if self.softmax or not isinstance(self.activation, str):
            return 1.0
        return activations.gain(activations.IDS[self.activation])

    @functools.cached_property
    def _constants(self) -> dict[str, Any]:
        act, act_set = 0, 0
        if not self.softmax:
            names = (self.activation,) if isinstance(self.activation, str) else self.activation
            act = activations.IDS[names[0]] if len(set(names)) == 1 else activations.PER_HEAD
            act_set = sum(1 << activations.IDS[name] for name in set(names)) if act == activations.PER_HEAD else 0
        return {
            "H": self.heads, "GROUP": self.group, "D": self.d, "DV": self.dv, "D_PAD": self.d_pad, "DV_PAD": self.dv_pad,
            "SOFTMAX": self.softmax, "ACT": act, "ACT_SET": act_set, "CAUSAL": self.causal, "WINDOW": self.window,
            "PRECISION": "ieee" if self.dtype == "fp32" else "tf32",
        }  # fmt: skip

    def constants(self, nvidia: bool, *without: str) -> dict[str, Any]:
        """Constexpr arguments that every kernel of the family takes, less the named ones."""
        found = {**self._constants, "FAST": activations.fast(nvidia, _DTYPES[self.dtype])}
        for name in without:
            del found[name]
        return found


@functools.lru_cache(maxsize=1024)
def plan(problem: Problem) -> Plan:
    """The plan of a `jagged_attention` or `gdpa` problem."""
    softmax = problem.op == "jagged_attention"
    window = problem.option("window")
    left, right = (-1, -1) if window is None else window
    causal = bool(problem.option("causal", False))
    activation = "raw" if softmax else problem.option("activation")
    if isinstance(activation, tuple) and len(set(activation)) == 1:
        activation = activation[0]
    return Plan(
        softmax=softmax,
        heads=problem.dim("H"),
        kv_heads=problem.dim("Hkv"),
        d=problem.dim("D"),
        dv=problem.dim("Dv"),
        scale=float(problem.option("scale" if softmax else "scale_in")),
        out_scale=float(problem.option("out_scale" if softmax else "scale_out")),
        activation=activation,
        causal=causal,
        window=left >= 0 or (right >= 0 and not causal),
        left=left if left >= 0 else UNBOUNDED,
        right=right if right >= 0 else UNBOUNDED,
        targets="num_targets" in problem.present,
        context="context_len" in problem.present and (causal or window is not None),
        bias="bias_position" in problem.present,
        time="bias_time" in problem.present,
        shared="kv_index" in problem.present,
        broadcast=bool(problem.option("broadcast_q", False)),
        q_bound=int(problem.option("max_q_len")),
        k_bound=int(problem.option("max_k_len")),
        dtype=_DTYPE_NAMES[problem.dtype("q")],
        deterministic=problem.deterministic,
    )
