"""Pictures of a model: its modules as a tree and as a layered graph."""
