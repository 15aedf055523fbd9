"""Triton implementations of the jagged data-movement ops."""

from gem_kernels.triton.jagged.spec import specs

__all__ = ["specs"]
