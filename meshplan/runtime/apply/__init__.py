"""Apply a plan to a live model: one module or folder per mesh axis or policy."""
