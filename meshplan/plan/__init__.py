"""The `Plan`, a spec applied to a model on a mesh, and its restriction to one pipeline stage."""
