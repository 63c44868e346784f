"""Decisions about FSDP2 units, offload, recomputation, and statistics of BatchNorm."""
