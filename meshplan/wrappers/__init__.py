"""When FSDP2 gathers, frees and reduces the parameters of each unit in the course of a step.

`fsdp.Units` replays FSDP2's hooks one by one, and calls a method of `fsdp.Actions` for each gather,
free and reduction. `memory.replay` implements these methods as changes of memory, and
`traffic.units` as counts of collectives.
"""
