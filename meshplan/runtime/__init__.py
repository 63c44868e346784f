"""The rooms that import torch: they read a Plan and apply it, and decide nothing."""
