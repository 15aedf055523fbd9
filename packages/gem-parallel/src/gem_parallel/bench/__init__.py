"""Benchmarks that run under torchrun: ``torchrun --nproc-per-node N -m gem_parallel.bench.embeddings``."""
