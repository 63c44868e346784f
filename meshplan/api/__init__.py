"""The functions behind the command line and the public names, one module per kind of question."""
