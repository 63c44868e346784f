"""The text of memory: an estimate, a module, the textbook."""
