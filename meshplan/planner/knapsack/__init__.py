"""The option of each block and the cuts between stages, solved exactly and bounded from below."""
