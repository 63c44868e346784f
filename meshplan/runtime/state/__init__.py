"""Training states of live models: what each rank holds, writes and reads."""
