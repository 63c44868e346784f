"""A decided plan applied to a live model, one module an axis or a policy."""
