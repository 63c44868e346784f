"""Every private name of torch, wrapped in a function or class that gives the reason for its use."""
