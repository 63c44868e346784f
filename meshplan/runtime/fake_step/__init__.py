"""One training step of one rank on fake tensors, with its allocations, kernels and collectives."""
