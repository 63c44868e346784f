"""Output for readers: text for terminals, JSON for scripts. These modules compute no results."""
