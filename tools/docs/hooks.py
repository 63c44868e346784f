"""Hooks of mkdocs: to `docs/` they add copies of other pages, and parts made from the code.

A page of `docs/` has `<!-- generated: NAME -->` where such a part belongs; `PARTS` makes them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from meshplan.interop.configs.tools import TOOLS  # noqa: E402
from tools.docs.names import python_page  # noqa: E402
from tools.docs.notebooks import notebook_to_markdown  # noqa: E402
from tools.docs.pages import copied_pages, with_blank_lines, with_links_of_the_site  # noqa: E402
from tools.docs.reference import config_keys_part, gpus_part, messages_part, verbs_part  # noqa: E402

MARKER: Final = re.compile(r"<!-- generated: (\w+) -->")
PARTS: Final[dict[str, Callable[[], str]]] = {
    "verbs": verbs_part,
    "gpus": gpus_part,
    "names": lambda: python_page(ROOT),
    "messages": lambda: messages_part(ROOT / "meshplan"),
    **{f"{name}_keys": partial(config_keys_part, name) for name in TOOLS},
}
MOST_SEARCHED_LINES: Final = 300
"""A longer page of evidence is a table of cells, which would make the search index large."""
_COPIED: Final = copied_pages(ROOT)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand outside of `docs/`."""
    for source, place in _COPIED.items():
        if source.endswith(".ipynb"):
            text, pictures = notebook_to_markdown(ROOT / source)
            for name, data in pictures.items():
                files.append(File.generated(config, f"gallery/{name}", content=data))
        else:
            text = (ROOT / source).read_text(encoding="utf-8")
            if text.count("\n") > MOST_SEARCHED_LINES:
                text = f"---\nsearch: {{exclude: true}}\n---\n\n{text}"
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Put in the parts that are made from the code, and lead links to pages of the site."""
    markdown = MARKER.sub(lambda found: PARTS[found[1]](), markdown)
    places = {f"docs/{file.src_uri}": file.src_uri for file in files.documentation_pages()}
    places |= _COPIED
    source = next(
        (source for source, place in _COPIED.items() if place == page.file.src_uri),
        f"docs/{page.file.src_uri}",
    )
    return with_blank_lines(with_links_of_the_site(markdown, source, places, ROOT))
