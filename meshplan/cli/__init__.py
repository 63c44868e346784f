"""The command line. `app` has the parser; each other module has a group of subcommands."""

from meshplan.cli.app import main

__all__ = ["main"]
