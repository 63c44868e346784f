"""The textbook formulas of training memory, and their inverses: parameters, GPUs."""
