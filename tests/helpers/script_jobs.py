"""Scripts of users on the ranks of a pool. Import it in a job only: it imports accelerate."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from typing import Any

from tests.helpers.lit import launched


def run(path: str, words: list[str], folder: str) -> Any:
    """Run a script in a folder, with torchrun's variables; return its `results`, or its error."""
    before = os.getcwd(), sys.argv
    with launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        os.chdir(folder)
        sys.argv = [path, *words]
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                return runpy.run_path(path, run_name="__main__")["results"]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            os.chdir(before[0])
            sys.argv = before[1]
