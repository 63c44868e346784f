"""What a live model is and does, read from running it without memory or numbers."""
