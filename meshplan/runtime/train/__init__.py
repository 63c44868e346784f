"""The training step, its gradients, the state dict, and training in one process without a plan."""
