"""Comparisons of the live model with itself, that refuse wrong numbers before an update."""
