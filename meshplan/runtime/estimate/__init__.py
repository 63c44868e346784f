"""Estimates of every rank's memory from fake steps: training steps on fake tensors."""
