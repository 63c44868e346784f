"""Structure and behaviour of a live model, recorded from a run without memory or values."""
