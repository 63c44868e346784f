"""Expert parallelism of a live model: tokens sent to the ranks of their experts."""
