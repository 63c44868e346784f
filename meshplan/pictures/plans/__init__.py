"""Pictures of a search (step time against memory, physical limits) and of a pipeline schedule."""
