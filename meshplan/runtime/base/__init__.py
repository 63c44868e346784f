"""What every part of the runtime stands on: ranks and mesh, nested values, batches, phases."""
