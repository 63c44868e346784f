"""Storages of one step of one rank in order, and what the device makes of them."""
