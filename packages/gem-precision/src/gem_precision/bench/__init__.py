"""Measurements of this package: kernels and linears on a GPU, and NE parity of recipes by training."""
