"""What a plan leaves open, and every configuration of it."""
