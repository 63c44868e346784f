"""What can be asked for: fastest, least memory, balanced stages, fewest devices."""
