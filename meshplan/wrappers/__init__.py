"""When the wrappers of parameters act in the course of a step: the rules of FSDP2.

`fsdp.Units` plays them hook by hook, and calls `fsdp.Actions` for each gather, free and reduction.
`memory.replay` reads the actions as bytes, `traffic.units` as counts of collectives.
"""
