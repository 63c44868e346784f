"""The training step, its gradients, and the state dict."""
