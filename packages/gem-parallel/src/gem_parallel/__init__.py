"""5D parallelism for recommendation models: 2D FSDP, expert parallelism, fully sharded 2D embedding tables."""
