"""Detection of hangs: where each rank is, and when it is certain that no rank can go on."""
