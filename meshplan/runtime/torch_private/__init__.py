"""Every use of a private name of torch, each in a function or class that gives the reason."""
