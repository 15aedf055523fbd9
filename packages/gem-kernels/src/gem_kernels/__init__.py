"""Jagged Flash Attention, GDPA, BlockAttention and norm fusion for recommendation models: Triton and Gluon, forward and backward."""
