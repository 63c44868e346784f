"""Infer the log of many blocks from few: find equal blocks, trace a few of them, repeat these."""
