"""Checks of the live model while it trains: each tells before a wrong number is used."""
