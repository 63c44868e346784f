"""Infer many blocks from few: equal ones are found, traced once, and repeated in the log."""
