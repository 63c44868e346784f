"""Best-first branch and bound over all configurations, each of them solved exactly.

**Objective.** A configuration c (a row of the grid: mesh, batch, schedule, offload) leaves two
things open: the option o of each block i (recomputation x reshard), and where the chain of blocks
is cut into pipeline stages s. With m microbatches, and β the share of the other ranks' time that a
rank waits for (`cost.pipeline.waiting_share`), a step takes

    T = (m - β) * max_s t_s + β * sum_s t_s + once[c]                                (1)
    t_s = sum of seconds[c, kind(i), o(i)] over the blocks i of stage s

where once[c] are the seconds of a step that no option changes. Every rank r keeps the activations
of f_r microbatches for their backward, and must stay within M bytes:

    sum over its blocks of (resident + f_r * saved)[c, kind(i), o(i)] + top_r + excess_r <= M   (2)

`tables.cost_table.CostTable` holds the arrays, `cost_table.weights` the factors of (1), and
`tables.stage_layout` f_r and top_r, the bytes of a rank besides those of its blocks. Only
`excess_r`, what the memory package's event-by-event replay reports above these linear figures, is
unknown until a candidate has been replayed.

**Lower bounds.** Each drops or relaxes something, so none exceeds the optimum of c:

    time_bounds     drops (2): every block takes its fastest option, and
                    max_s t_s >= max(sum_s t_s / pp, the slowest block)
    memory_bounds   drops (1): every block takes its smallest option; above M, c is out
    priced_bounds   weak duality: for any price λ >= 0 of a byte,
                    sum_s t_s >= sum_i min_o (seconds + λ bytes) - λ (pp M - sum_r top_r)
    config_bound    lets blocks split: the LP relaxation of every possible stage's knapsack
                    (`knapsack.solve_relaxations`), and the best cut of these (`least_cut_cost`)

**Exact answer of one configuration** (`config.solve_config`). For a fixed stage the options are a
multiple-choice knapsack (`knapsack.solve`: LP bound, greedy filling, reduced-cost fixing, label
setting with dominance). `stage_cuts.cut_into_stages` finds the best cut under the LP bounds and
replaces the bounds on its path by exact values until the whole path is exact.

**Proof** (`search.search`). A queue holds every configuration under the highest bound found for it
so far. The configuration with the lowest bound is taken out and its bound is raised, in the order
above. Once the bound is exact, the plan is replayed. If the plan fits, T is the new incumbent T*.
If not, the M of each rank is lowered by its excess for this configuration, which goes back into the
queue. In the end, `failures.resolve_failures` replays those candidates that a lowered M left out
and that would be faster than T*, assuming only that a rank that does not fit does not fit in any
candidate of its configuration that puts at least as many linear bytes on it either. A configuration
whose smallest candidate does not fit is excluded if most of the excess of the ranks that are over
(`NodeState.hopes`) leaves no candidate, and larger microbatches with it. When no bound in the queue
is below T* (1 - `TOLERANCE`), no plan of the space is faster than T* by more than the tolerance,
under the cost and memory models that are printed with the answer.

**Stages of a live model** (`stage_ranges`). Their linear bytes leave out what is computed outside
of the blocks, and excess_r differs between ranks, so M is not lowered. A replay says which ranks
are over, and what a rank holds depends on its own blocks alone. For each block range that is over,
other options of the same blocks are replayed, and `ConfigSolver` takes the fastest that fits, or
excludes the range. What was excluded without a proof counts in the gap.

A search that is stopped early reports the lowest bound in the queue (`SearchResult.lower_s`), and
with it the gap that is left.
"""
