"""`python -m meshplan` is the command line."""

from meshplan.cli import run

run()
