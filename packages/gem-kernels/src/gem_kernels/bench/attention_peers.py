"""Other implementations of the same computation, where they can be imported. None is a dependency of this package."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_kernels.bench.attention_rows import Data

Peer = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(Exception):
    """The peer is not there, or cannot do the row; the text says why."""


def varlen_attn(data: Data) -> Peer:
    """torch.nn.attention.varlen: packed FlashAttention-2."""
    try:
        from torch.nn.attention.varlen import varlen_attn as attend
    except ImportError as error:
        raise Unavailable(str(error)) from None
    row, t = data.row, data.tensors
    window = (-1, 0) if row.causal else row.window or (-1, -1)
    longest_q, longest_k = int(data.q_lengths.max()), int(data.k_lengths.max())
    more = {"scale": row.dim**-0.5}
    if window != (-1, -1):
        more["window_size"] = window
    return lambda q, k, v: attend(q, k, v, t["q_offsets"], t["k_offsets"], longest_q, longest_k, **more)


def fa4(data: Data) -> Peer:
    """FlashAttention-4 in CuTe DSL (`flash_attn.cute`)."""
    try:
        from flash_attn.cute import flash_attn_varlen_func as attend
    except Exception as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from None
    row, t = data.row, data.tensors
    more = {"causal": row.causal, "softmax_scale": row.dim**-0.5}
    if row.window is not None:
        more["window_size"] = row.window

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = attend(q, k, v, cu_seqlens_q=t["q_offsets"], cu_seqlens_k=t["k_offsets"], **more)
        return result[0] if isinstance(result, tuple) else result

    return run


def cudnn_padded(data: Data) -> Peer:
    """cuDNN through scaled_dot_product_attention on tensors padded to the longest sample, padding time not counted.

    Without a key mask, which cuDNN would pay for: padded keys are attended, so the result is right for dense rows only, and the time is the
    least that padding can cost.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    row = data.row
    shape = lambda longest: (row.batch, longest, row.heads, row.dim)  # noqa: E731
    q = torch.randn(shape(row.q[0]), device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(shape((row.k or row.q)[0]), device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(2))

    def run(*_: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=row.causal)

    run.leaves, run.note = (q, k, v), "padded, unchecked"  # type: ignore[attr-defined]
    return run


def flex(data: Data) -> Peer:
    """FlexAttention on the packed tensors with a block mask by sample, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    row = data.row
    sample = torch.repeat_interleave(torch.arange(row.batch), data.q_lengths).cuda()
    n = sample.numel()

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return sample[i] == sample[j]

    mask = create_block_mask(same, None, None, n, n, device="cuda", _compile=True)
    attend = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attend(q, k, v, block_mask=mask, scale=row.dim**-0.5)[0].transpose(0, 1)

    return run


def fbgemm_jfa(data: Data) -> Peer:
    """FBGEMM's Triton jagged flash attention (`fbgemm_gpu.sll`): ``[H, N, D]``, no scale before softmax, 1 / longest after it."""
    try:
        from fbgemm_gpu.sll.triton import multi_head_jagged_flash_attention as attend
    except Exception as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from None
    row, t = data.row, data.tensors
    if row.k is not None or row.causal or row.window or row.broadcast:
        raise Unavailable("full self-attention only")
    leaves = tuple(t[name].detach().transpose(0, 1).contiguous().requires_grad_() for name in "qkv")
    longest = int(data.q_lengths.max())

    def run(*_: Tensor) -> Tensor:
        return attend(*leaves, t["q_offsets"], longest)

    run.leaves, run.note = leaves, "layout and scales of its own, unchecked"  # type: ignore[attr-defined]
    return run


PEERS: dict[str, Callable[[Data], Peer]] = {
    "varlen_attn": varlen_attn, "fa4": fa4, "cudnn_padded": cudnn_padded, "flex": flex,
    "fbgemm_jfa": fbgemm_jfa,
}  # fmt: skip
