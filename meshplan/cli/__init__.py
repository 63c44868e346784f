"""The command line: `app` has the parser, the other modules one group of verbs each."""

from meshplan.cli.app import main

__all__ = ["main"]
