"""What is free in a plan, searched whole: the fastest choice, that it is the fastest, and why.

The space is declared and printed (`space`), costs come from `cost`, memory is pruned by figures
that are never too high (`numbers`) and decided by the memory room's own replay (`settle`). Nothing
here knows a formula of its own for either.

From room to room: `space` and `enumeration` say what there is, `tables` and `held` put figures
beside every row, `search` takes the best first, `row` (`lanes`, `knapsack`, `cuts`) solves one
exactly, `brief` and `gauge` look at it with a short model, and `job` asks the memory room, whose
word counts.
"""
