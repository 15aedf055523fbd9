"""Products and tokens of summed Wukong experts in one pass. Importing this imports no triton."""

from gem_kernels.triton.tokens.spec import specs

__all__ = ["specs"]
