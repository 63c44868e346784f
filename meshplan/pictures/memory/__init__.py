"""Pictures of memory: categories, events over time, modules, and the steps between estimates."""
