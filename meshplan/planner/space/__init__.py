"""The choices that a plan leaves open, and every configuration that they allow."""
