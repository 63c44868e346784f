"""Textbook formulas of training memory, and their inverses: largest model, fewest GPUs."""
