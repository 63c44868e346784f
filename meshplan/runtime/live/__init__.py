"""Planning a live model: what is asked of it, and the plan that all ranks agree on."""
