"""`meshplan verify`: a plan on local processes, compared with one process without any plan."""
