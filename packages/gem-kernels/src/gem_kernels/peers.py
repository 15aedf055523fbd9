"""What torch itself offers for the same computations, so that a training ladder can show a model without this package's kernels.

Never chosen automatically; ``[kernels.ops]`` names them: "varlen" (packed FlashAttention-2 of `torch.nn.attention.varlen`) and "sdpa"
(`scaled_dot_product_attention` where all samples are equally long) for `jagged_attention`, "matmul" for `norm_gdpa` (two batched matrix
products on rows bucketed by length, norms and activation compiled around them), "compiled" for the norm ops and `mlp`
(torch.compile of the unfused form). Lengths come to the host once for a batch's offsets, which is one wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_core import KernelSpec
from gem_core.errors import OpError
from gem_core.ops.activations import act, act_grad
from gem_core.ops.contract import YES, Problem, Supported, no
from gem_core.ops.contracts import JAGGED_ATTENTION
from gem_core.ops.remember import remembered
from gem_kernels.eager import dense

PRIORITY = -10
_GRID = 65_535
Saved = tuple[Tensor | None, ...]


def specs() -> list[KernelSpec]:
    """Every implementation of this module, for `gem_kernels.plugin`."""
    plain: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "norm": (dense.norm_forward, dense.norm_backward),
        "norm_linear": (dense.norm_linear_forward, dense.norm_linear_backward),
        "linear_norm": (dense.linear_norm_forward, dense.linear_norm_backward),
        "mlp": (dense.mlp_forward, dense.mlp_backward),
    }
    found = [
        KernelSpec("jagged_attention", "varlen", varlen_forward, varlen_backward, _flash, PRIORITY),
        KernelSpec("jagged_attention", "sdpa", sdpa_forward, sdpa_backward, _flash, PRIORITY),
        KernelSpec("norm_gdpa", "matmul", matmul_forward, matmul_backward, _one_activation, PRIORITY),
    ]
    return found + [
        KernelSpec(op, "compiled", _compiled_op(forward), _compiled_op(backward), _plain, PRIORITY)
        for op, (forward, backward) in plain.items()
    ]


def _plain(problem: Problem) -> Supported:
    return no("no low-precision arithmetic") if problem.precision is not None else YES


def _one_activation(problem: Problem) -> Supported:
    return no("one activation for all heads") if not isinstance(problem.option("activation"), str) else _plain(problem)


def _flash(problem: Problem) -> Supported:
    if problem.device != "cuda":
        return no("CUDA only")
    if problem.dtype("q") not in (torch.bfloat16, torch.float16):
        return no("bf16 and fp16 only")
    others = problem.present - {"q_offsets"}
    if others:
        return no(f"no {sorted(others)[0]}")
    if problem.dim("D") != problem.dim("Dv") or problem.dim("D") % 8 or problem.dim("D") > 256:
        return no("D = Dv, a multiple of 8 up to 256")
    if problem.option("out_scale") != 1.0 or problem.option("window") is not None:
        return no("no out_scale, no window")
    return _plain(problem)


class _Packed:
    """q, k, v of a call as FlashAttention takes them: offsets of both sides, and a shared q repeated for every sample."""

    def __init__(self, problem: Problem, tensors: Saved) -> None:
        t: dict[str, Any] = dict(zip(JAGGED_ATTENTION.tensors, tensors))
        self.k, self.v, self.k_offsets = t["k"], t["v"], t["k_offsets"].int()
        self.samples, self.shared = self.k_offsets.numel() - 1, t["q_offsets"] is None
        self.k_longest, self.k_rows, self.k_equal = lengths(t["k_offsets"])
        if self.shared:
            self.each = t["q"].shape[0]
            self.q = t["q"].unsqueeze(0).expand(self.samples, -1, -1, -1).flatten(0, 1)
            self.q_offsets = torch.arange(self.samples + 1, device=self.k.device, dtype=torch.int32) * self.each
            self.q_longest, self.q_rows, self.q_equal = self.each, self.q.shape[0], True
        else:
            self.q, self.q_offsets = t["q"], t["q_offsets"].int()
            self.q_longest, self.q_rows, self.q_equal = lengths(t["q_offsets"])
        self.causal, self.scale = problem.option("causal", False), problem.option("scale")

    def dq(self, dq: Tensor) -> Tensor:
        return dq.view(self.samples, self.each, *dq.shape[1:]).sum(0) if self.shared else dq

    def batched(self) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, H, L, D]`` each."""
        if not (self.q_equal and self.k_equal):
            raise OpError(
                "sdpa: the samples of this batch differ in length", where="kernels.ops.jagged_attention", fix="pad them, or use varlen"
            )
        q, k, v = (x.view(self.samples, -1, *x.shape[1:]).transpose(1, 2) for x in (self.q, self.k, self.v))
        return q, k, v


def lengths(offsets: Tensor) -> tuple[int, int, bool]:
    """The longest sample, the rows of all of them, and whether they are equally long; read once for given offsets."""

    def read() -> tuple[int, int, bool]:
        if offsets.numel() == 1:
            return 0, 0, True
        each = offsets.diff()
        longest, shortest, rows = torch.stack([each.max(), each.min(), offsets[-1]]).tolist()
        return longest, rows, longest == shortest

    return remembered([offsets], "lengths of a peer", read)


def varlen_forward(problem: Problem, *tensors: Tensor | None) -> tuple[tuple[Tensor, Tensor], Saved]:
    p = _Packed(problem, tensors)
    if p.samples > _GRID:
        raise OpError(
            f"varlen: {p.samples:,} samples, a dimension of FlashAttention's grid holds {_GRID:,}",
            where="kernels.ops.jagged_attention",
            fix="use smaller batches or another implementation",
        )
    if p.samples:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            p.q, p.k, p.v, p.q_offsets, p.k_offsets, p.q_longest, p.k_longest, 0.0, p.causal, False, scale=p.scale
        )
    else:
        out, lse = torch.empty_like(p.q), torch.empty(p.q.shape[1::-1], dtype=torch.float32, device=p.q.device)
    out[p.q_rows :] = 0
    # FlashAttention's sum of a row without keys is +inf, and slack rows are not written
    lse.masked_fill_(lse == torch.inf, -torch.inf)
    lse[:, p.q_rows :] = -torch.inf
    return (out, lse), (*tensors, out, lse)


def varlen_backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    *tensors, out, lse = saved
    assert lse is not None
    p = _Packed(problem, tuple(tensors))
    if not p.samples:
        return p.dq(torch.zeros_like(p.q)), torch.zeros_like(p.k), torch.zeros_like(p.v), None, None, None, None
    state = torch.zeros(2, dtype=torch.uint64, device=dout.device)
    sums = lse.masked_fill(lse == -torch.inf, torch.inf)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout.contiguous(), p.q, p.k, p.v, out, sums, p.q_offsets, p.k_offsets, p.q_longest, p.k_longest, 0.0, p.causal, state, state[:0],
        scale=p.scale,
    )  # fmt: skip
    dk[p.k_rows :], dv[p.k_rows :] = 0, 0
    if not p.shared:
        dq[p.q_rows :] = 0
    return p.dq(dq), dk, dv, None, None, None, None


def sdpa_forward(problem: Problem, *tensors: Tensor | None) -> tuple[tuple[Tensor, Tensor], Saved]:
    p = _Packed(problem, tensors)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*p.batched(), 0.0, p.causal, False, scale=p.scale)
    packed = out.transpose(1, 2).flatten(0, 1).contiguous()
    sums = lse.transpose(0, 1).flatten(1).contiguous()
    return (packed, sums), (*tensors, packed, sums)


def sdpa_backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    *tensors, out, lse = saved
    assert out is not None
    assert lse is not None
    p = _Packed(problem, tuple(tensors))
    q, k, v = p.batched()
    d, o = (x.view(p.samples, -1, *x.shape[1:]).transpose(1, 2) for x in (dout.contiguous(), out))
    state = torch.zeros(2, dtype=torch.uint64, device=dout.device)
    sums = lse.view(lse.shape[0], p.samples, -1).transpose(0, 1).contiguous()
    # Offsets would say that rows are packed: these are dense
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        d, q, k, v, o, sums, None, None, p.q_longest, p.k_longest, 0.0, p.causal, state, state[:0], scale=p.scale
    )
    dq, dk, dv = (g.transpose(1, 2).flatten(0, 1) for g in grads)
    return p.dq(dq), dk, dv, None, None, None, None


# --- norm_gdpa by matrix products ---


def matmul_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor) -> Any:
    eps, name, scale_in, scale_out = (problem.option(n) for n in ("eps", "activation", "scale_in", "scale_out"))
    keys, values = _by_head(k, k_offsets), _by_head(v, k_offsets)
    l, mean, rstd = _compiled(_before)(q, eps)
    attended = torch.zeros_like(l)
    for samples, longest in buckets(q_offsets):
        places = _places(q_offsets, samples, longest, q.shape[0])
        s = _take(l, places, longest) @ _select(keys, samples).transpose(1, 2)
        _put(attended, places, _compiled(_weights)(name, scale_in, scale_out, s) @ _select(values, samples))
    out, out_rstd = _compiled(_after)(attended, l, q, q_offsets, eps)
    return out, (q, k, v, q_offsets, k_offsets, out, mean, rstd, out_rstd)


def matmul_backward(problem: Problem, saved: Saved, dout: Tensor, needs: tuple[bool, ...]) -> Saved:
    q, k, v, q_offsets, k_offsets, out, mean, rstd, out_rstd = saved
    assert q is not None
    assert k is not None
    assert v is not None
    assert q_offsets is not None
    assert k_offsets is not None
    name, scale_in, scale_out = (problem.option(n) for n in ("activation", "scale_in", "scale_out"))
    keys, values = _by_head(k, k_offsets), _by_head(v, k_offsets)
    l, do = _compiled(_before_backward)(dout, q, q_offsets, out, mean, rstd, out_rstd)
    dl, dk, dv = torch.zeros_like(l), torch.zeros_like(keys), torch.zeros_like(values)
    for samples, longest in buckets(q_offsets):
        places = _places(q_offsets, samples, longest, q.shape[0])
        rows, g, own = _take(l, places, longest), _take(do, places, longest), _select(keys, samples)
        p, ds = _compiled(_dscores)(name, scale_in, scale_out, rows @ own.transpose(1, 2), g @ _select(values, samples).transpose(1, 2))
        dv.index_copy_(1, samples, (p.transpose(1, 2) @ g).view(*dv.shape[:1], -1, *dv.shape[2:]))
        dk.index_copy_(1, samples, (ds.transpose(1, 2) @ rows).view(*dk.shape[:1], -1, *dk.shape[2:]))
        _put(dl, places, ds @ own)
    dq = _compiled(_after_backward)(dl, do, dout, q, q_offsets, mean, rstd)
    return dq, _by_row(dk, k), _by_row(dv, v)


def buckets(offsets: Tensor) -> list[tuple[Tensor, int]]:
    """Samples ``[n]`` whose lengths lie between two powers of two, and the longest of them; samples without rows are in none."""

    def find() -> list[tuple[Tensor, int]]:
        each = offsets.diff().tolist()
        order = sorted((n, i) for i, n in enumerate(each) if n)
        groups = [list(g) for _, g in groupby(order, key=lambda x: (x[0] - 1).bit_length())]
        return [(torch.tensor([i for _, i in g], device=offsets.device), g[-1][0]) for g in groups]

    return remembered([offsets], "buckets of a peer", find)


def _by_head(x: Tensor, offsets: Tensor) -> Tensor:
    """``[H, B, keys, D]``."""
    longest, rows, equal = lengths(offsets)
    if not equal:
        raise OpError("matmul: the samples of this batch differ in keys", where="kernels.ops.norm_gdpa", fix="use another implementation")
    return x[:rows].view(offsets.numel() - 1, longest, *x.shape[1:]).permute(2, 0, 1, 3).contiguous()


def _by_row(x: Tensor, like: Tensor) -> Tensor:
    """Inverse of `_by_head`; slack rows are zero."""
    rows = x.permute(1, 2, 0, 3).flatten(0, 1)
    return rows if rows.shape == like.shape else torch.cat([rows, rows.new_zeros(like.shape[0] - rows.shape[0], *rows.shape[1:])])


def _places(offsets: Tensor, samples: Tensor, longest: int, rows: int) -> Tensor:
    """Row of each of ``longest`` places of the samples, ``rows`` where a sample has none, ``[n * longest]``."""
    at = torch.arange(longest, device=offsets.device)
    begin = offsets[samples][:, None]
    return torch.where(begin + at < offsets[samples + 1][:, None], begin + at, rows).flatten()


def _take(x: Tensor, places: Tensor, longest: int) -> Tensor:
    """``[H, N + 1, D] -> [H * n, longest, D]``."""
    return x.index_select(1, places).view(-1, longest, x.shape[2])


def _put(x: Tensor, places: Tensor, rows: Tensor) -> None:
    x.index_copy_(1, places, rows.view(x.shape[0], -1, x.shape[2]))


def _select(x: Tensor, samples: Tensor) -> Tensor:
    """``[H, B, keys, D] -> [H * n, keys, D]``."""
    return x.index_select(1, samples).flatten(0, 1)


def _weights(name: str, scale_in: float, scale_out: float, s: Tensor) -> Tensor:
    return scale_out * act(name, scale_in * s)


def _dscores(name: str, scale_in: float, scale_out: float, s: Tensor, dp: Tensor) -> tuple[Tensor, Tensor]:
    return scale_out * act(name, scale_in * s), scale_in * scale_out * act_grad(name, scale_in * s) * dp


def _headed(x: Tensor, like: Tensor) -> Tensor:
    """``[N, H * D] -> [H, N + 1, D]`` in ``like``'s dtype, a row of zeros last."""
    return F.pad(x.to(like.dtype).view(like.shape).transpose(0, 1), (0, 0, 0, 1)).contiguous()


def _before(q: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x = q.flatten(1).float()
    var, mean = torch.var_mean(x, 1, correction=0)
    rstd = torch.rsqrt(var + eps)
    return _headed((x - mean[:, None]) * rstd[:, None], q), mean, rstd


def _live(x: Tensor, offsets: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)[:, None] < offsets[-1]


def _after(attended: Tensor, l: Tensor, q: Tensor, offsets: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    o = (attended + l)[:, :-1].transpose(0, 1).flatten(1).float()
    rstd = torch.rsqrt(o.square().mean(1) + eps)
    out = torch.where(_live(q, offsets), o * rstd[:, None] + q.flatten(1).float(), 0)
    return out.to(q.dtype).view(q.shape), rstd


def _before_backward(
    dout: Tensor, q: Tensor, offsets: Tensor, out: Tensor, mean: Tensor, rstd: Tensor, out_rstd: Tensor
) -> tuple[Tensor, Tensor]:
    x, live = q.flatten(1).float(), _live(q, offsets)
    d = torch.where(live, dout.flatten(1).float(), 0)
    hat = torch.where(live, out.flatten(1).float() - x, 0)
    do = torch.where(live, out_rstd[:, None] * (d - hat * (d * hat).mean(1, keepdim=True)), 0)
    l = torch.where(live, (x - mean[:, None]) * rstd[:, None], 0)
    return _headed(l, q), _headed(do, q)


def _after_backward(dl: Tensor, do: Tensor, dout: Tensor, q: Tensor, offsets: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    normed = (q.flatten(1).float() - mean[:, None]) * rstd[:, None]
    g = (dl.float() + do.float())[:, :-1].transpose(0, 1).flatten(1)
    dq = rstd[:, None] * (g - g.mean(1, keepdim=True) - normed * (g * normed).mean(1, keepdim=True)) + dout.flatten(1).float()
    return torch.where(_live(q, offsets), dq, 0).to(q.dtype).view(q.shape)


def _compiled_op(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: _compiled(function)(*arguments)


@lru_cache(maxsize=64)
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled for any lengths, once for every problem: a model has more of them than torch compiles a function for."""
    compiled = torch.compile(function, dynamic=True)

    def call(*arguments: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=64):
            return compiled(*arguments)

    return call
