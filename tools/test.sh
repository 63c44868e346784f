#!/usr/bin/env bash
# Everything a change has to pass. Uses the Python of .venv, or the one named by $PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

"$python" -m ruff check .
"$python" -m ruff format --check .

# Beside the tests, of which many leave a core idle; told when they have ended, if it found anything.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
"$python" -m mypy >"$types" 2>&1 &
checking=$!
status=0
"$python" -m pytest "$@" || status=$?
wait "$checking" || { status=$?; cat "$types"; }
exit "$status"
