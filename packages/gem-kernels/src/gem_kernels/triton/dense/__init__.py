"""Triton implementations of norm, norm_linear, linear_norm, mlp and norm_gdpa."""

from gem_kernels.triton.dense.spec import specs

__all__ = ["specs"]
