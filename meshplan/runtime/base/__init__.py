"""Foundations of the runtime: ranks and mesh, nested values, batches, phases of a step."""
