"""Seconds of every configuration and lower bounds on its bytes, as arrays."""
