"""The modules that import torch. They apply a Plan to a live model, and decide nothing about it."""
