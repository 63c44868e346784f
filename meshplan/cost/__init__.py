"""Estimate the time of a step: kernels by a roofline, collectives by topology, and their overlap.

Every quantity is computed for many global configurations at once (`grid.GRID`), since the planner
prices about a hundred thousand of them. A single plan is a grid of one configuration. FLOPs and
bytes are counted from the ops of a tape (`memory.tape.tape`), from which the memory estimate
follows, too.
"""
