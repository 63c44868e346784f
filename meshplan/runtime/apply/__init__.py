"""Apply a decided plan to a live model: one module per mesh axis or policy."""
