"""Objectives of planning: the fastest plan, the least memory, a balance of both, fewest devices."""
