"""The `Plan`, a spec assigned to a model on a mesh, and the part of it that one stage runs."""
