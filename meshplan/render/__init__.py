"""What a reader sees: text for terminals, JSON for scripts. Computes nothing, reads values."""
