"""The notebooks: run as a reader would, and kept so that two runs have the same text.

`python -m tests.notebooks [WORD]` runs those whose names have the word, and writes their outputs.
"""

from __future__ import annotations

import base64
import io
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "notebooks"
NOTEBOOKS: Final = sorted(FOLDER.glob("[0-9]_*.ipynb"))
TIMEOUT_S: Final = 900
"""Of a cell; a machine that does other things too is slow."""


def run(path: Path) -> Any:
    """The notebook after a run of all its cells, in its own folder."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        client = NotebookClient(
            notebook, timeout=TIMEOUT_S, kernel_name="python3",
            resources={"metadata": {"path": str(FOLDER)}}, record_timing=False,
        )  # fmt: skip
        client.execute()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return notebook


def cleaned(notebook: Any) -> Any:
    """Without what differs from run to run or from machine to machine, and its pictures small."""
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
         "language_info": {"name": "python"}}
    )  # fmt: skip
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
        if cell.cell_type != "code":
            continue
        cell.outputs = _joined([out for out in cell.outputs if out.get("name") != "stderr"])
        for out in cell.outputs:
            if "data" in out:
                out.metadata = nbformat.from_dict({})
                # Widgets live as long as their kernel; what is kept is their still.
                out.data.pop("application/vnd.jupyter.widget-view+json", None)
                if "image/png" in out.data:
                    out.data.pop("text/html", None)
                    out.data["image/png"] = _small(out.data["image/png"])
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """What is printed arrives in pieces of any size."""
    found: list[Any] = []
    for out in outputs:
        if found and out.get("name") == found[-1].get("name") == "stdout":
            found[-1].text += out.text
        else:
            found.append(out)
    return found


def _small(png: str) -> str:
    """A picture has few colours: a third of the bytes."""
    image, small = Image.open(io.BytesIO(base64.b64decode(png))), io.BytesIO()
    image.convert("RGB").quantize(dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def texts(notebook: Any) -> list[str]:
    """What each cell of code prints and returns; pictures by their sentence."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            text = "".join(
                out["text"] if "text" in out else out["data"].get("text/plain", "") + "\n"
                for out in cell.outputs
                if out.get("name") != "stderr" and ("text" in out or "data" in out)
            )
            # Where an object is in memory is nobody's business.
            found.append(re.sub(r"0x[0-9a-f]+", "0x…", text))
    return found


def main(words: list[str]) -> int:
    """Run and write."""
    for path in NOTEBOOKS:
        if not words or any(word in path.name for word in words):
            began = time.monotonic()
            nbformat.write(cleaned(run(path)), path)
            kib = path.stat().st_size / 1024
            print(f"{path.name}: {time.monotonic() - began:.1f} s, {kib:,.0f} KiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
