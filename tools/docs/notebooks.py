"""A notebook as Markdown with pictures: its text, its code, and what it prints and draws."""

from __future__ import annotations

import base64
import json
from pathlib import Path


def notebook_to_markdown(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the page of a notebook, and its pictures by file name."""
    lines: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [source, ""]
            continue
        lines += ["```python", source, "```", ""]
        for output in cell["outputs"]:
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", ""))).rstrip("\n")
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                lines += [f"![{_alternative(text)}]({name})", ""]
            elif text:
                lines += ["```text", text, "```", ""]
    return "\n".join(lines), pictures


def _alternative(text: str) -> str:
    """Return the sentence that a picture prints as, for readers who do not see it."""
    return " ".join(text.split()).replace("[", "(").replace("]", ")")
