"""Memory of a live model under a plan, from fake steps of the ranks that differ."""
