"""Objectives of planning: least step time, least memory, a balance of both, or fewest GPU-hours."""
