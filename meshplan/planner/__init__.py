"""Search everything that a plan leaves open for the fastest plan that fits, and explain the answer.

A *configuration* is a row of the grid: mesh, batch, schedule, offload and loss chunks. A
*candidate* also fixes the options of every block (recompute and reshard) and the cuts between
stages. *Linear bytes* are lower bounds on a rank's memory that are sums over its blocks. A *replay*
is the memory package's event-by-event estimate of a candidate; the bytes that it reports above the
linear bytes are the candidate's *excess*.

Each package has one task:

- `space` declares which choices are open and enumerates the grid of configurations.
- `tables` holds the seconds (from the cost package) and lower bounds on the bytes of every
  configuration as arrays.
- `solve` searches the configurations best first. `knapsack` chooses the options of a stage's blocks
  and the cuts between stages.
- `problem` joins these for one request. It excludes plans by lower bounds from truncated models and
  asks the memory package for a replay, which alone decides what fits.
- `objectives` chooses by time, memory, balance or cost. `answers` explains the choice, and `lock`
  writes it to plan.lock.yaml.
"""
