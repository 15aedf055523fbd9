"""MXFP8 and FP8 recipes with numerics guards for recommendation models."""
