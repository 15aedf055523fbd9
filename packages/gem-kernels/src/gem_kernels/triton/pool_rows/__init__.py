"""Pooling by shared queries of the normed rows themselves. Importing this imports no triton."""

from gem_kernels.triton.pool_rows.spec import specs

__all__ = ["specs"]
