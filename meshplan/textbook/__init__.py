"""Textbook formulas of training memory, and their inverses: most parameters, fewest GPUs."""
