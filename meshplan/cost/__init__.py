"""Estimate the time of a step: kernels by a roofline, collectives by topology, and their overlap.

Every quantity is computed for many global configurations at once (`grid.GRID`), since the planner
asks for a hundred thousand of them; a single plan is a grid of one configuration. The work is read
from the same tape ops that the memory estimate uses (`memory.tape.tape`), so that each block is
described once.
"""
