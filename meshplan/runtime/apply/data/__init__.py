"""Data parallelism of a live model: FSDP2 and DDP, gradients, batches."""
