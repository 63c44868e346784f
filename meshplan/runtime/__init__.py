"""The modules that import torch: they read a Plan and apply it, and make no planning decision."""
