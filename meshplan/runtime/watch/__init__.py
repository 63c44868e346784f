"""Detection of failed and hanging ranks: every rank raises an error that names rank and cause."""
