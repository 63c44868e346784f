"""Tensor parallelism of a live model by DTensor."""
