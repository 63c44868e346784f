"""Pictures of a mesh: where ranks lie, what they hold, and what travels between them."""
