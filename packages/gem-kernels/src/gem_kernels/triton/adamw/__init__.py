"""AdamW's update in one pass over a parameter. Importing this imports no triton."""

from gem_kernels.triton.adamw.spec import specs

__all__ = ["specs"]
