"""Kernel benchmarks: ``gemrec bench kernels``.

Every result is checked against float64 before it is timed; times are medians of CUDA-graph replays with the variants interleaved; a matrix
product and a copy of the same run are the ceilings that the rates are compared with.
"""
