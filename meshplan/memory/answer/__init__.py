"""The answer to "does it fit?": the peak of every class of ranks, by category and by module."""
