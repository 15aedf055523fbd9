"""Saved activations in fewer bits: what autograd keeps between forward and backward goes through a format and back.

Only 16-bit floating tensors with rows of at least 32 elements are packed: those are activations. Parameters and their casts, masks,
indices, norm and softmax statistics (fp32) and quantised payloads stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gem_precision.formats import MX, element, pack_codes, quantize_mx, unpack_codes


@dataclass
class SavedBytes:
    """Bytes of the tensors that were packed, before and after."""

    before: int = 0
    after: int = 0


@dataclass(frozen=True, eq=False)
class _Packed:
    payload: Tensor
    scales: Tensor
    elem: str
    shape: torch.Size
    dtype: torch.dtype

    def restore(self) -> Tensor:
        elem = element(self.elem)
        data = self.payload if elem.bits == 8 else unpack_codes(self.payload, elem.bits, self.shape[-1])
        return MX(data.view(self.shape), self.scales, self.elem, (1, 32)).dequantize(self.dtype)


@dataclass
class SavedActivations:
    """``elem``: e4m3 (8.25 bits an element) or e2m1 (4.25 bits), in strips of 1x32."""

    elem: str = "e2m1"
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    count: SavedBytes = field(default_factory=SavedBytes)

    @contextmanager
    def __call__(self) -> Iterator[SavedBytes]:
        """What is saved for backward inside is packed."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield self.count

    def _pack(self, t: Tensor) -> Any:
        if t.dtype not in self.dtypes or t.dim() < 2 or t.shape[-1] < 32 or t.numel() == 0 or _is_weight(t):
            return t
        q = quantize_mx(t, elem=self.elem)
        bits = element(self.elem).bits
        payload = q.data if bits == 8 else pack_codes(q.data, bits)
        self.count.before += t.numel() * t.element_size()
        self.count.after += payload.numel() + q.scales.numel()
        return _Packed(payload, q.scales, self.elem, t.shape, t.dtype)

    @staticmethod
    def _unpack(packed: Any) -> Tensor:
        return packed.restore() if isinstance(packed, _Packed) else packed


_VIEWS = ("TBackward0", "ToCopyBackward0", "TransposeBackward0", "ViewBackward0", "PermuteBackward0", "UnsqueezeBackward0")


def _is_weight(t: Tensor) -> bool:
    """Whether ``t`` is a parameter, or the cast or view of one that autocast and matrix products make."""
    if isinstance(t, nn.Parameter):
        return True
    node = t.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is not None and node.name() == "CastWeightsBackward":
        return True
    return node is not None and isinstance(getattr(node, "variable", None), nn.Parameter)


def wrap_forward(module: nn.Module, saved: SavedActivations) -> None:
    """Run ``module.forward`` under ``saved``."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with saved():
            return inner(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]
