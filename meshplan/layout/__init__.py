"""Parallelism as data: meshes, layouts of tensors, styles, schedules, optimizers, hardware."""
