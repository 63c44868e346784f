"""Pictures of a mesh: its ranks, their shards, and the bytes sent between them."""
