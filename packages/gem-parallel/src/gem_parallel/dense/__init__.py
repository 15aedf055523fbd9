"""Strategies for the dense part: ``ddp``, ``fsdp``, ``hsdp``, and expert parallelism beside the last two."""
