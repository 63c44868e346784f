"""Decisions about tp: which projections, attention heads and losses are sharded, and how."""
