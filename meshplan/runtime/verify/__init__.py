"""`meshplan verify`: a plan on local processes, beside one process without any plan."""
