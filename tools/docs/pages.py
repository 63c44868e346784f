"""Where each file of the repository stands on the site, and the links between them.

Pages link as GitHub shows them: within `docs/` by relative paths, to everything else by the address
of the repository. On the site, a link to a file that has a page there leads to that page.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

REPOSITORY: Final = "https://github.com/meshplan/meshplan"
_LINK: Final = re.compile(r"(\]\()([^)\s]+)(\))")
_ITEM: Final = re.compile(r"([-*]|\d+\.) ")
_FENCE: Final = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def copied_pages(root: Path) -> dict[str, str]:
    """Return the pages that stand outside of `docs/`: places on the site by path in the tree."""
    pages = {
        "README.md": "index.md",
        "CONTRIBUTING.md": "contributing.md",
        "CHANGELOG.md": "changelog.md",
        "SECURITY.md": "security.md",
        "notebooks/README.md": "gallery/notebooks.md",
    }
    for path in sorted((root / "notebooks").glob("[0-9]_*.ipynb")):
        pages[f"notebooks/{path.name}"] = f"gallery/{path.stem}.md"
    for path in sorted((root / "tests" / "bench").glob("*.md")):
        pages[f"tests/bench/{path.name}"] = f"evidence/{path.name}"
    return pages


def with_links_of_the_site(text: str, source: str, places: Mapping[str, str], root: Path) -> str:
    """Return a page with its links as they are on the site.

    Args:
        text: The page as Markdown.
        source: Its path in the repository.
        places: Every page of the site by its path in the repository.
        root: The repository.
    """
    here = posixpath.dirname(places[source])

    def moved(found: re.Match[str]) -> str:
        target, _, section = found[2].partition("#")
        path = _path_of(target, source)
        if path is None or not target:
            return found[0]
        path = f"{path}/README.md" if f"{path}/README.md" in places else path
        if path not in places and not (root / path).exists():
            return found[0]  # A picture that is made for the site.
        if path in places:
            target = posixpath.relpath(places[path], here or ".")
        elif not path.startswith("docs/"):
            kind = "tree" if (root / path).is_dir() else "blob"
            target = f"{REPOSITORY}/{kind}/main/{path}"
        else:
            target = posixpath.relpath(path.removeprefix("docs/"), here or ".")
        return f"{found[1]}{target}{'#' if section else ''}{section}{found[3]}"

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(moved, part) for part in parts)


def with_blank_lines(text: str) -> str:
    """Return a page with a blank line before each list and table, which mkdocs needs.

    GitHub does not, and pages are written for both.
    """
    out: list[str] = []
    is_code = False
    for line in text.splitlines():
        before = out[-1] if out else ""
        is_list, is_table = _ITEM.match(line), line.startswith("|")
        goes_on = _ITEM.match(before) or before.startswith(" ") if is_list else before[:1] == "|"
        if not is_code and before and (is_list or is_table) and not goes_on:
            out.append("")
        is_code ^= line.lstrip().startswith("```")
        out.append(line)
    return "\n".join(out) + "\n"


def _path_of(target: str, source: str) -> str | None:
    """Return the path in the repository that a link leads to; None if it leads elsewhere."""
    for kind in ("blob", "tree"):
        prefix = f"{REPOSITORY}/{kind}/main/"
        if target.startswith(prefix):
            return target.removeprefix(prefix)
    if re.match(r"[a-z]+:", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
