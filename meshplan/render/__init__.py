"""Formatting of results as text for terminals and as JSON for scripts; nothing is computed here."""
