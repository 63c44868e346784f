"""How long a step takes: kernels by a roofline, collectives by topology, and what hides what.

Everything is computed for many global configurations at once (`grid.GRID`), since the planner asks
for a hundred thousand of them; one plan is a grid of one row. Work comes from the same rows of a
tape that memory is told from (`memory.tape.tape`), so that a block has one description.
"""
