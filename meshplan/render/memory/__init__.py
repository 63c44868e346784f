"""Text and JSON about memory: estimates of a step, of a module, and of states by the textbook."""
