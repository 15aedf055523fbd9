"""What every Triton implementation shares: the device's facts, launching, tile configurations and their tuning.

- `device`: what the chip is, and where kernels may run
- `launch`: `launch(kernel, grid, ...)`, which compiles without a GPU inside `compile_only`
- `configs`: committed tile configurations per architecture, read from ``gem_kernels/triton/configs/<architecture>/<family>.json``
- `tune`: on an architecture without a table, measure a few candidates once and remember the best on disk
"""
