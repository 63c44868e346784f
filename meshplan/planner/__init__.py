"""Search everything that a plan leaves open for the fastest plan that fits, and explain the answer.

Each package has one task:

- `space` declares which choices are open and enumerates the grid of configurations.
- `tables` holds the seconds (from the cost package) and lower bounds on the bytes of every
  configuration as arrays.
- `solve` searches the configurations best first. `knapsack` solves the options of a stage's blocks
  and the cuts between stages.
- `problem` joins these for one request. It excludes plans by truncated models and asks the memory
  package for an event-by-event replay, which alone decides what fits.
- `objectives` chooses by time, memory, balance or cost. `answers` explains the choice, and `lock`
  writes it to plan.lock.yaml.
"""
