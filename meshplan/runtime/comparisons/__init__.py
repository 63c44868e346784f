"""Checks that a step computed in parts, on ranks and microbatches, equals the step of one process.

They compare losses and outputs of parts of a batch with those of the whole.
"""
