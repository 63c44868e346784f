"""The command line. `app` has the parser; each other module has a group of subcommands."""

from typing import NoReturn

from meshplan.cli.app import main
from meshplan.own_process import IS_COMMAND, leave_at_once, search_rarely

__all__ = ["main", "run"]


def run() -> NoReturn:
    """Run the command that `sys.argv` states, in a process of its own, and exit."""
    search_rarely()
    IS_COMMAND.set(True)
    leave_at_once(main())
