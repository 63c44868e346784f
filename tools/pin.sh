#!/usr/bin/env bash
# Write requirements-hashed.txt: all of constraints.txt, and what torch's ordinary wheel for Linux on
# x86_64 needs beside it, each with the hashes of its files. Nothing large is downloaded. Takes uv
# (`pip install uv`), or the one named by $UV. To install from it, and from nothing else:
#     pip install --require-hashes -r requirements-hashed.txt
set -euo pipefail
cd "$(dirname "$0")/.."

# Neither an index nor a folder of this machine is written down: whoever installs has their own.
"${UV:-uv}" pip compile constraints.txt --output-file requirements-hashed.txt --quiet \
    --generate-hashes --no-annotate --no-config --custom-compile-command tools/pin.sh \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28
