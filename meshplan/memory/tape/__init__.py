"""A model's operations as data, and the player that says what they allocate and free."""
