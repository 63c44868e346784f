"""Seconds and bytes of every configuration, as arrays."""
