"""Losses: in chunks of tokens, on logits sharded over the vocabulary, weighted by tokens."""
