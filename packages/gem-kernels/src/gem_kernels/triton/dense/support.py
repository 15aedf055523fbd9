"""What the launchers of the dense family share: sizes, descriptors, arithmetic of fp32 products, sums of weight gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_core.ops import siblings
from gem_core.ops.contract import YES, Problem, Supported, no
from gem_kernels.triton.common.configs import Config
from gem_kernels.triton.common.device import DeviceInfo, runs_on

HALF = (torch.bfloat16, torch.float16)
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def common_support(problem: Problem, tensors: tuple[str, ...]) -> Supported:
    """Device and dtypes: ``tensors`` share one of bf16, fp16, fp32 (float64 is left to implementations that compute in it)."""
    where = runs_on(problem.device)
    if not where:
        return where
    dtypes = {problem.dtype(name) for name in tensors}
    if len(dtypes) > 1 or not dtypes <= set(NAMES):
        return no(f"{', '.join(tensors)} must share one of bf16, fp16, fp32, got {', '.join(sorted(map(str, dtypes)))}")
    return YES


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two >= n, and >= ``least`` (a dot operand's smallest side)."""
    return max(least, 1 << (n - 1).bit_length())


def precision(dtype: torch.dtype, info: DeviceInfo) -> str:
    """fp32 products on NVIDIA: three tf32 products (error about 1e-6) run on tensor cores; "ieee" would be scalar code that spills."""
    return "tf32x3" if dtype == torch.float32 and info.nvidia else "ieee"


def rows_contiguous(t: Tensor | None) -> Tensor | None:
    """A tensor whose last dimension is contiguous and whose first stride is small enough for 32-bit offsets within a tile; else a copy."""
    return t if t is None or t.numel() == 0 or (t.stride(-1) == 1 and t.stride(0) < 1 << 23) else t.contiguous()


def stride(t: Tensor | None) -> int:
    """Row stride; 0 for an absent matrix."""
    return 0 if t is None else t.stride(0)


def unique(configs: list[Config]) -> list[Config]:
    """Without repetitions, in order."""
    return [c for i, c in enumerate(configs) if c not in configs[:i]]


def descriptors_possible(info: DeviceInfo, *matrices: Tensor | None) -> bool:
    """Whether tensor descriptors can address all of them: base and row stride aligned to 16 bytes, something there."""
    return info.tma and all(
        t.numel() > 0 and t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.stride(1) == 1
        for t in matrices
        if t is not None
    )


def source(t: Tensor | None, rows: int, columns: int, tma: bool) -> Any:
    """``t``, or its descriptor for tiles of [rows, columns]."""
    if t is None or not tma:
        return t
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(t, [rows, columns])


def weight_grad(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``aᵀ b`` [A, B] in fp32 for a [M, A], b [M, B], added to ``out``: a plain matrix product, where the vendor's library is best."""
    if a.is_cuda and a.dtype in HALF and a.shape[0]:
        # the library's split products are faster with the longer side as columns
        turned = a.shape[1] > b.shape[1] >= 128
        found = torch.mm(b.t(), a, out_dtype=torch.float32).t() if turned else torch.mm(a.t(), b, out_dtype=torch.float32)
    else:
        found = torch.mm(a.t().float(), b.float())
    return found if out is None else out.add_(found)


def column_sum(a: Tensor) -> Tensor:
    """Sum over the rows in fp32: what came with them (`gem_core.ops.siblings`), else, on a GPU, a product with ones, which takes half the
    time of PyTorch's reduction.

    The ones lie row by row: side by side, their stride would be the number of rows, and one that is no multiple of 8 brings the library's
    slowest kernel (0.69 ms for 250,000 rows of 1,536 on an H200, of which reading them is 0.16).
    """
    known = siblings.sums_of(a)
    if known is not None:
        return known
    if a.is_cuda and a.dtype in HALF and a.shape[0]:
        return torch.mm(a.new_ones((a.shape[0], 8)).t(), a, out_dtype=torch.float32)[0]
    return a.sum(0, dtype=torch.float32)


def cast(needs: tuple[bool, ...], likes: tuple[Tensor | None, ...], grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The needed gradients in their inputs' dtypes."""
    return tuple(g.to(t.dtype) if need and g is not None and t is not None else None for need, t, g in zip(needs, likes, grads))
