"""Ranks that stand still: where each of them is, and when it is certain that they wait in vain."""
