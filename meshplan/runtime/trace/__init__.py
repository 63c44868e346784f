"""The structure of a live model, and its forward, recorded on tensors without values or memory."""
