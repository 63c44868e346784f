"""One planning problem: its space, its model's figures, and the memory estimates that decide."""
