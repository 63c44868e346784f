"""A model's operations as data, and the player that turns them into allocations and frees."""
