#!/usr/bin/env bash
# Everything a change has to pass. Uses the Python of .venv, or the one named by $PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
# Tests start hundreds of processes that import meshplan: compile it once, not in each of them.
unset PYTHONDONTWRITEBYTECODE

"$python" -m ruff check .
"$python" -m ruff format --check .

# Beside the tests; told when they have ended, if it found anything.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
"$python" -m mypy >"$types" 2>&1 &
checking=$!
status=0
# Two at a time: one process leaves a core idle for half of its time. Tests of a file stay together,
# since they share ranks that wait for the next job.
"$python" -m pytest -n 2 --dist loadfile "$@" || status=$?
wait "$checking" || { status=$?; cat "$types"; }
exit "$status"
