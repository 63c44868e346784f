"""FSDP2 units, what is offloaded or recomputed, and statistics of BatchNorm."""
