"""The summed Wukong experts of one layer, computed together on a device.

One by one, experts read and write all tokens again and again: each has its own projection, compression, concatenation and addition, and
each hands a gradient of all tokens back. Together, with Y_e, L_e, MLP_e of the experts e and f the number of tokens that an FM block gives,

    x + sum_e [MLP_e(norm_e(x (xᵀ Y_e))) ; L_e x]  =  [x_f + sum_e MLP_e(...) ; x_rest + (sum_e L_e) x],

the projections and the sum of the compressions are one product that reads x once, the last products of the MLPs add to their sum in place,
and the gradient of x is one tensor that four products add to. Results differ from those of the experts by rounding only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn

from gem_core.model.interaction import Wukong
from gem_core.model.layers import column_sums, is_plain, product_dtype
from gem_core.ops import expert_tokens


def together(experts: Sequence[nn.Module], shortcut: nn.Module, x: Tensor) -> Sequence[Wukong] | None:
    """The experts, if `summed` gives what they and the identity as shortcut would: plain Wukong experts, with plain linear layers (a
    recipe's quantise their inputs, one by one) and nothing hooked in or wrapped around. Only on a device, and not while compiling.
    """
    if not x.is_cuda or torch.compiler.is_compiling() or type(shortcut) is not nn.Identity:
        return None
    found = [e for e in experts if type(e) is Wukong and e.fm.project is not None]
    if len(found) < len(experts) or len({e.fm.out for e in found}) != 1 or not all(is_plain(part) for e in found for part in e.modules()):
        return None
    mlps = [e.fm.mlp for e in found]
    alike = all(m.activation == "relu" and len(m.layers) == 2 and all(type(layer) is nn.Linear for layer in m.layers) for m in mlps)
    drops = any(m.dropout.p and m.dropout.training for m in mlps)
    return found if alike and not drops else None


def summed(experts: Sequence[Wukong], x: Tensor) -> Tensor:
    """``x + sum_e expert_e(x)``, ``[B, n, d] -> [B, n, d]``, for experts that `together` gave."""
    dtype = product_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        x = x.to(dtype)
        fms = [e.fm for e in experts]
        projections = [fm.project.to(dtype).t() for fm in fms if fm.project is not None]
        weight = torch.cat([*projections, _sum([e.linear.weight.to(dtype) for e in experts])])
        ups, downs = ([cast("nn.Linear", fm.mlp.layers[i]) for fm in fms] for i in range(2))
        total, *products = _Tokens.apply(x, weight, _sum([down.bias.to(dtype) for down in downs]), len(fms), fms[0].out)
        inputs: list[Tensor] = []
        for fm, up, down, product in zip(fms, ups, downs, products):
            inputs += [fm.norm(product), up.weight.to(dtype), up.bias.to(dtype), down.weight.to(dtype)]
        return _Mlps.apply(total, fms[0].out, *inputs)  # type: ignore[no-any-return]


class _Tokens(torch.autograd.Function):
    """``(x [B, n, d], weight [E r + n - f, n], bias [f d], E, f)`` -> the tokens ``[B, n, d]`` to which the MLPs' results are still to be
    added, and each expert's ``x (xᵀ Y_e)``, ``[B, n r]``. ``weight`` holds the transposed Y_e and below them the sum of the L_e."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, experts: int, f: int) -> tuple[Tensor, ...]:
        b, n, d = x.shape
        ctx.f, ctx.run = f, expert_tokens.implementation(x, weight, experts, f)
        if ctx.run is not None:
            ctx.save_for_backward(x, weight)
            total, each = ctx.run.forward(x, weight, bias)
            return (total, *each.unbind())
        projected = weight.shape[0] - (n - f)
        made = torch.bmm(weight.expand(b, -1, -1), x)
        z = made[:, :projected]
        products = torch.bmm(x, z.transpose(1, 2)).view(b, n, experts, projected // experts)
        each = products.permute(2, 0, 1, 3).reshape(experts, b, n * projected // experts)
        total = x.new_empty(x.shape)
        torch.add(x[:, :f], bias.view(f, d), out=total[:, :f])
        torch.add(x[:, f:], made[:, projected:], out=total[:, f:])
        ctx.save_for_backward(x, weight, z)
        return (total, *each.unbind())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dtotal: Tensor, *dproducts: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, *given), f = ctx.saved_tensors, ctx.f
        b, n, _ = x.shape
        dtotal = dtotal.contiguous()
        dbias = column_sums(dtotal.flatten(1)[:, : f * x.shape[2]])
        if ctx.run is not None:
            return (*ctx.run.backward(x, weight, dtotal, dproducts), dbias, None, None)
        (z,) = given
        projected = z.shape[1]
        dp = torch.stack([g.reshape(b, n, projected // len(dproducts)) for g in dproducts], 2).view(b, n, projected)
        down = x.new_empty(b, *weight.shape[:1], x.shape[2])
        torch.bmm(dp.transpose(1, 2), x, out=down[:, :projected])
        down[:, projected:].copy_(dtotal[:, f:])
        dx = torch.baddbmm(dtotal, dp, z)
        dx.baddbmm_(weight.t().expand(b, -1, -1), down)
        dweight = column_sums(torch.bmm(down, x.transpose(1, 2)).flatten(1)).view(weight.shape)
        return dx, dweight, dbias, None, None


class _Mlps(torch.autograd.Function):
    """``total [B, n, d]`` with ``sum_e relu(h_e W_eᵀ + b_e) V_eᵀ`` added to its first f tokens, in place; ``(h_e, W_e, b_e, V_e)`` of
    each expert follow one another, ``h_e [B, in]``, ``V_e [f d, hidden]``."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, f: int, *inputs: Tensor) -> Tensor:
        into = _first(total, f)
        saved: list[Tensor] = []
        for h, w, b, v in _fours(inputs):
            hidden = torch._addmm_activation(b, h, w.t())  # type: ignore[attr-defined]
            into.addmm_(hidden, v.t())
            saved += [h, w, hidden, v]
        ctx.mark_dirty(total)
        ctx.save_for_backward(*saved)
        ctx.f = f
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dtotal = dtotal.contiguous()
        dy = _first(dtotal, ctx.f)
        grads: list[Tensor] = []
        for h, w, hidden, v in _fours(ctx.saved_tensors):
            dhidden = torch.ops.aten.threshold_backward(dy @ v, hidden, 0)
            grads += [dhidden @ w, dhidden.t() @ h, column_sums(dhidden), dy.t() @ hidden]
        return dtotal, None, *grads


def _first(tokens: Tensor, f: int) -> Tensor:
    """The first f of ``tokens [B, n, d]`` as ``[B, f d]``, a view."""
    return tokens.flatten(1)[:, : f * tokens.shape[2]]


def _fours(tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [tensors[i : i + 4] for i in range(0, len(tensors), 4)]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)
