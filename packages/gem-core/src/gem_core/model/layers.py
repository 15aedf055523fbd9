"""Small modules that every part is built from.

Linear maps stay `torch.nn.Linear` modules, so that a precision recipe can find and replace them: the fused ops are used only while the
module is exactly that type. What a recipe puts there may take the norm or activation before it into its own pass (`after_norm`), and also
hand the norm's input on (``after_norm_through(x, kind, eps) -> (result, x)``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core import ops
from gem_core.model.config import NormKind
from gem_core.ops import add_linear, siblings
from gem_core.ops.add_linear import AddLinear


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """``[N, sum of n, ...]`` of tensors ``[N, n, ...]``; a single one is left as it is, and so is one whose columns they all are."""
    if len(parts) == 1:
        return parts[0]
    known = siblings.whole(parts)
    return torch.cat(tuple(parts), 1) if known is None else known


class Norm(nn.Module):
    """RMS or layer norm over the last dimension of ``[..., d]``; ``affine`` gives it a weight and, for "layer", a bias."""

    def __init__(self, dim: int, kind: NormKind = "rms", *, affine: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.empty(dim)) if affine else None
        self.bias = nn.Parameter(torch.empty(dim)) if affine and kind == "layer" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm(x, kind=self.kind, weight=self.weight, bias=self.bias, eps=self.eps)


class NormLinear(nn.Module):
    """Affine-free norm over the last dimension, then linear: ``[N, in] -> [N, out]``."""

    def __init__(self, in_features: int, out_features: int, kind: NormKind = "rms", *, bias: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.linear = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, x: Tensor, *, through: bool = False) -> Any:
        """``through``: the pair (result, x); a later use of that x costs no addition of gradients (see `gem_core.ops.norm_linear`)."""
        linear = self.linear
        if type(linear) is nn.Linear:
            return ops.norm_linear(x, linear.weight, linear.bias, kind=self.kind, eps=self.eps, through=through)
        if through and hasattr(linear, "after_norm_through"):
            return linear.after_norm_through(x, self.kind, self.eps)
        y = after_norm(linear, x, self.kind, self.eps)
        return (y, x) if through else y


class FeedForward(nn.Module):
    """Pre-norm FFN with residual on packed rows: ``s + W2 act(W1 norm(s))``, ``[N, d] -> [N, d]``."""

    def __init__(self, dim: int, hidden: int, kind: NormKind = "rms", *, activation: str = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, self.activation = kind, activation
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, s: Tensor) -> Tensor:
        if type(self.up) is nn.Linear and type(self.down) is nn.Linear:
            y = ops.mlp(s, self.up.weight, self.up.bias, self.down.weight, self.down.bias, activation=self.activation, norm=self.kind)
        else:
            y = after_activation(self.down, after_norm(self.up, s, self.kind), self.activation)
        return s + self.dropout(y)


class Mlp(nn.Module):
    """``[..., in] -> [..., widths[-1]]``: linear layers with ``activation`` and dropout between them, none after the last."""

    def __init__(self, in_features: int, widths: Sequence[int], *, activation: str = "relu", dropout: float = 0.0) -> None:
        super().__init__()
        sizes = [in_features, *widths]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.activation = activation
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.dropout(activate(layer(x), self.activation))
        return self.layers[-1](x)


class Gate(nn.Module):
    """InterFormer's self-gate ``sigma(z * (1 + W z + b))`` on ``[..., d]`` with sigma = SiLU; the 1 lets it begin open."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, z: Tensor) -> Tensor:
        return F.silu(z * (1 + self.linear(z)))


class MaskNet(nn.Module):
    """``W (s * MLP_mask(s))``, ``[N, width] -> [N, dim]``: InterFormer's map of an event's concatenated fields."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.mask = Mlp(width, (dim, width))
        self.map = nn.Linear(width, dim)

    def forward(self, s: Tensor) -> Tensor:
        return self.map(s * self.mask(s))


class TokenMix(nn.Module):
    """Linear map over the token axis, ``[B, n_in, d] -> [B, n_out, d]``: the linear compression of Wukong. ``weight [n_out, n_in]``."""

    cast_with_products = ("weight",)

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return with_each(self.weight, x) if x.dim() == 3 else torch.matmul(self.weight.to(x.dtype), x)


def with_each(weight: Tensor, x: Tensor) -> Tensor:
    """``weight [m, n]`` times each of ``x [B, n, d]``."""
    if not x.is_cuda:
        return torch.matmul(weight.to(x.dtype), x)
    if torch.compiler.is_compiling():
        return torch.bmm(weight.to(x.dtype).expand(x.shape[0], -1, -1), x)
    dtype = product_dtype(x)
    return _WithEach.apply(weight.to(dtype), x.to(dtype))  # type: ignore[no-any-return]


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a matrix product of x is computed in: x's own, or that of autocast, which leaves float64 alone."""
    device = x.device.type
    cast = x.dtype != torch.float64 and device != "meta" and torch.is_autocast_enabled(device)  # torch refuses the question for meta
    return torch.get_autocast_dtype(device) if cast else x.dtype


def is_plain(module: nn.Module) -> bool:
    """Whether calling ``module`` does what its class says, with parameters that are plain tensors."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    own = all(type(p) in (nn.Parameter, Tensor) for p in module._parameters.values() if p is not None)
    return own and not hooks and "forward" not in vars(module)


class _WithEach(torch.autograd.Function):
    """``weight [m, n]`` times each of ``x [B, n, d]`` on a device, where matmul would copy x turned, and its gradient back, to make one
    product of the whole batch."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        return torch.bmm(weight.expand(x.shape[0], -1, -1), x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, x = ctx.saved_tensors
        dx = torch.bmm(weight.t().expand(x.shape[0], -1, -1), dy) if ctx.needs_input_grad[1] else None
        dweight = column_sums(torch.bmm(dy, x.transpose(1, 2)).flatten(1)).view(weight.shape) if ctx.needs_input_grad[0] else None
        return dweight, dx


MANY_ROWS = 16_384
"""Rows from which on a bias's gradient is a product on a device."""


def column_sums(x: Tensor) -> Tensor:
    """``x.sum(0)`` of ``[N, d]``, as `gem_core.ops.siblings.column_sums` does it, rounded to x's dtype by the product itself."""
    known = siblings.sums_of(x)
    if known is not None:
        return known.to(x.dtype)
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return (x.new_ones((x.shape[0], 8)).t() @ x)[0]
    return x.sum(0)


class _RowsLinear(torch.autograd.Function):
    """``x wᵀ + b`` of many rows, whose bias gradient is one of `column_sums`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(x, w, b)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad
        return dy @ w if need_x else None, dy.t() @ x if need_w else None, column_sums(dy) if need_b else None


def _many(x: Tensor) -> bool:
    if torch.compiler.is_compiling():  # first, since a question for the rows would compile anew for each answer
        return False
    return x.is_cuda and x.numel() >= MANY_ROWS * x.shape[-1] and x.dtype in (torch.bfloat16, torch.float16)


def rows_linear(linear: nn.Module, x: Tensor) -> Tensor:
    """``linear(x)`` of rows ``[..., in]``."""
    if _many(x) and type(linear) is nn.Linear:
        w, b = linear.weight, linear.bias
        if w.dtype == x.dtype and b is not None and b.dtype == x.dtype:
            return _RowsLinear.apply(x.flatten(0, -2), w, b).unflatten(0, x.shape[:-1])
    return linear(x)


class _AddedLinear(torch.autograd.Function):
    """``residual + x wᵀ + b`` by an implementation of the op "add_linear"."""

    @staticmethod
    def forward(ctx: Any, run: AddLinear, residual: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return run(residual, x, w, b)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        _, need_residual, need_x, need_w, need_b = ctx.needs_input_grad
        sums = siblings.column_sums(dy)
        dx = None
        if need_x:
            dx = dy @ w
            siblings.leave_sums([dx], sums @ w.to(sums.dtype))
        return None, dy if need_residual else None, dx, dy.t() @ x if need_w else None, sums.to(w.dtype) if need_b else None


def added_linear(linear: nn.Module, x: Tensor, residual: Tensor, dropout: nn.Dropout | None = None) -> Tensor:
    """``residual + dropout(linear(x))`` of rows ``[N, in]``. A module that a recipe put in a linear's place may do it at once:
    ``linear.added(x, residual)``."""
    dropped = dropout is not None and dropout.p and dropout.training
    if not dropped and hasattr(linear, "added"):
        return linear.added(x, residual)  # type: ignore[no-any-return]
    if _many(x) and x.dim() == 2 and type(linear) is nn.Linear and not dropped:
        w, b = linear.weight, linear.bias
        if b is not None and {w.dtype, b.dtype, residual.dtype} == {x.dtype} and (run := add_linear.implementation(x, w)) is not None:
            return _AddedLinear.apply(run, residual, x, w, b)  # type: ignore[no-any-return]
    y = rows_linear(linear, x)
    return residual + (y if dropout is None else dropout(y))


def after_norm(linear: nn.Module, x: Tensor, kind: NormKind, eps: float = 1e-6) -> Tensor:
    """``linear(norm(x))``. A module that a recipe put in a linear's place may do both at once: ``linear.after_norm(x, kind, eps)``."""
    fused = getattr(linear, "after_norm", None)
    return linear(ops.norm(x, kind=kind, eps=eps)) if fused is None else fused(x, kind, eps)


def after_activation(linear: nn.Module, x: Tensor, name: str) -> Tensor:
    """``linear(activation(x))``, likewise with ``linear.after_activation(x, name)``."""
    fused = getattr(linear, "after_activation", None)
    return linear(activate(x, name)) if fused is None else fused(x, name)


def activate(x: Tensor, name: str) -> Tensor:
    """``name`` of an elementwise activation of the dense towers: relu, gelu, silu."""
    return {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}[name](x)
