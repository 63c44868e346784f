"""Parameters of a live model: initial values, shards, writes in forward."""
