"""Checkpointing of each block and stage boundaries, chosen exactly and bounded from below."""
