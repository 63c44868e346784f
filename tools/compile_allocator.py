"""Compile `meshplan/memory/log/allocator.c`, if there is a C compiler.

    python tools/compile_allocator.py

compiles it in this folder, as installing the package does (`hatch_build.py`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

SOURCE = Path("meshplan/memory/log/allocator.c")
LIBRARY = SOURCE.with_name("libmeshplan_allocator.so")


def compile_allocator(root: Path) -> Path | None:
    """Compile the allocator beside its source.

    Args:
        root: The folder that contains `meshplan`.

    Returns:
        The library; None if there is no compiler, or it fails. The package works without it.
    """
    source, library = root / SOURCE, root / LIBRARY
    words = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(words[0]) is None:
        return None
    digest = f"-DSOURCE={zlib.crc32(source.read_bytes())}u"
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        made = Path(folder, library.name)
        command = [*words, "-O2", "-shared", "-fPIC", digest, "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{shlex.join(command)} failed: {done.stderr.strip()}", file=sys.stderr)
            return None
        # Replace it at once: another process may be using it.
        made.replace(library)
    return library


if __name__ == "__main__":
    print(compile_allocator(Path(__file__).parents[1]) or "not compiled: no C compiler")
