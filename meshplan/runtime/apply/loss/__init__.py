"""Losses of sharded logits: in chunks, by vocabulary, weighted by tokens."""
