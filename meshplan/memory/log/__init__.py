"""The event log of one rank's training step, and the device memory that follows from it."""
