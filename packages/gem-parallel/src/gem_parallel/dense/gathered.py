"""Quantised all-gather: a process sends its shard of a matrix as a codec's payload and scales, and decodes what it receives.

Only what travels is quantised; the fp32 masters, the gradients and the optimizer are not touched. FSDP2 asks a local tensor that has
``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` what to send and how to read it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gem_core.hookspecs import CodecSpec


def quantise_gathers(module: nn.Module, codec: CodecSpec, ranks: int) -> tuple[list[str], list[str]]:
    """Before ``fully_shard``: let the matrices of ``module`` be gathered over ``ranks`` processes in ``codec``.

    Returns names of the parameters that are, and of the matrices that are not because a shard would not be whole rows, equal on all ranks
    and a multiple of the codec's alignment. Vectors are gathered as they are.
    """
    taken, left = [], []
    for name, parameter in list(module.named_parameters()):
        if parameter.dim() < 2 or type(parameter) is not nn.Parameter:
            continue
        if parameter.shape[0] % ranks or parameter.numel() // ranks % codec.alignment:
            left.append(name)
            continue
        owner, _, own = name.rpartition(".")
        marked = nn.Parameter(GatheredQuantised(parameter.detach(), codec), parameter.requires_grad)
        module.get_submodule(owner).register_parameter(own, marked)
        taken.append(name)
    return taken, left


_aten = torch.ops.aten
_KEPT = {
    _aten.detach.default, _aten.split.Tensor, _aten.slice.Tensor, _aten.narrow.default, _aten.view.default, _aten.as_strided.default,
    _aten.new_zeros.default, _aten.empty_like.default, _aten.clone.default, _aten.copy_.default, _aten._to_copy.default,
    _aten._pin_memory.default,
}  # fmt: skip
"""What FSDP2 does to a parameter on the way to its shard: the results stay of the kind. Anything else gives plain tensors."""


class GatheredQuantised(torch.Tensor):
    """``plain_values``, a plain tensor, in a type that FSDP2 asks for its own all-gather."""

    plain_values: Tensor
    codec: CodecSpec

    @staticmethod
    def __new__(cls, values: Tensor, codec: CodecSpec) -> GatheredQuantised:
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype, "device": values.device}
        return torch.Tensor._make_wrapper_subclass(cls, values.size(), **layout)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, values: Tensor, codec: CodecSpec) -> None:
        self.plain_values, self.codec = values, codec

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: list[CodecSpec] = []

        def plain(tensor: GatheredQuantised) -> Tensor:
            found.append(tensor.codec)
            return tensor.plain_values

        result = function(*tree_map_only(cls, plain, args), **tree_map_only(cls, plain, kwargs or {}))
        return tree_map_only(Tensor, lambda t: cls(t, found[0]), result) if function in _KEPT else result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[torch.Size, torch.dtype]]:
        return self.codec.encode(self.plain_values), (outer_size, self.plain_values.dtype)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: tuple[torch.Size, torch.dtype], param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        size, dtype = metadata
        whole = self.codec.decode(*outputs, param_dtype or dtype).view(size)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None
