"""Every private torch name, behind a function that gives the reason."""
