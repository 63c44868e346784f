"""`meshplan verify`: run a plan on local processes and compare it with training in one process."""
