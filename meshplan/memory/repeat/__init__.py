"""Many equal blocks from few: found once, traced once, repeated in the log."""
