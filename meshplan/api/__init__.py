"""The functions behind the command line and the public names, one module a kind of question."""
