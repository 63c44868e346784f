"""Pictures of a search: time against memory, limits, and a pipeline's schedule."""
