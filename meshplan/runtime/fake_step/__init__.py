"""One training step on fake tensors: every allocation, kernel and collective of one rank."""
