"""Triton implementation of block_attention."""

from gem_kernels.triton.block.spec import specs

__all__ = ["specs"]
