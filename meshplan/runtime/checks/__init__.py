"""Checks of the live model during training; each raises before a wrong number is used."""
