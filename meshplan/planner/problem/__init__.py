"""One planning problem: its space, its model's costs, and the memory estimates that decide."""
