"""Styles on modules: which projections, heads and losses an axis shards."""
