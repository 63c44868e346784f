"""The text of a plan: layouts, stages, ranks."""
