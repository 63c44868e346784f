"""Parameters of a live model: initial values, `max_norm`, random numbers."""
