"""The choices that a plan leaves open, and every configuration of them."""
