"""A finished picture, and how it is saved and shown."""

from __future__ import annotations

import html
import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from meshplan.errors import Origin, Problem, SpecError
from meshplan.files import check_writable, write_bytes
from meshplan.pictures.base.fonts import drawable, families_of
from meshplan.pictures.base.views import POLICY, STYLE, script, switched

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES: Final = (".png", ".svg", ".html")
DPI: Final = 120

_SAVING: Final = Lock()
"""Lock for saving, because saving changes matplotlib settings that are global to the process."""
_SVG: Final = {"svg.fonttype": "none", "svg.hashsalt": "meshplan"}
_FONT: Final = "'DejaVu Sans'"
_GROUP: Final = re.compile(r'<g id="([^"]*)"([^>]*)>')
_REFERRED: Final = re.compile(r'\bid="|url\(#|href="#')
_NUMBERED: Final = re.compile(r"[\w.]+_\d+")
"""Ids that matplotlib gives to groups without a name."""

_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{policy}
<title>{title}</title>
<style>
body {{ margin: 1rem; background: {paper}; color: {ink}; font: 16px/1.5 sans-serif; }}
figure {{ margin: 0 auto; max-width: 75rem; overflow-x: auto; }}
svg {{ width: 100%; height: auto; }}
{style}
</style>
</head>
<body>
{figure}
{script}</body>
</html>
"""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Picture:
    """A picture that answers one question about a plan.

    Args:
        what: Name of the picture in `pictures.main.WHATS`.
        title: The answer in one sentence.
        alt: A description for readers who cannot see the picture.
        figure: The matplotlib figure.
        views: Pairs (name, picture) between which buttons on a page switch, this picture first; ()
            for no buttons.
        choice: Label of these buttons.
        narrow: Draws the same picture for a narrow screen, such as a phone's; None if there is no
            such drawing. A page shows it where the wide one would be too small to read.
    """

    what: str
    title: str
    alt: str
    figure: Figure
    views: tuple[tuple[str, Picture], ...] = ()
    choice: str = ""
    narrow: Callable[[], Picture] | None = None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture as png, svg, or html with an svg inside; the suffix decides which.

        Returns:
            The path of the file.

        Raises:
            SpecError: The name has another suffix, or the file cannot be written.
        """
        target = Path(path)
        check_target(target)
        if target.suffix.lower() == ".png":
            content = self._repr_png_()
        elif target.suffix.lower() == ".svg":
            content = self.svg().encode()
        else:
            content = self.page().encode()
        write_bytes(target, content, "the picture")
        return target

    def svg(self) -> str:
        """Return the picture as svg, with selectable text instead of outlines of letters."""
        out = io.StringIO()
        with _settings(), warnings.catch_warnings():
            # An svg names fonts but does not contain them: glyphs missing here do not matter.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            self.figure.savefig(
                out, format="svg", facecolor=self.figure.get_facecolor(),
                metadata={"Date": None, "Creator": "meshplan", "Title": self.title,
                          "Description": self.alt},
            )  # fmt: skip
        text = out.getvalue().replace(_FONT, f"{_FONT}, Verdana, sans-serif")
        return _GROUP.sub(_titled, text)

    def inline(self, *, caption: bool = True) -> str:
        """Return an HTML element with the svg, and a description for readers who cannot see it.

        Args:
            caption: If True, the description is also shown below the picture.
        """
        text = self.svg()
        text = text[text.index("<svg") :]
        label = html.escape(f"{self.title}. {self.alt}", quote=True)
        # Not wider than the surrounding element.
        style = 'style="max-width:100%;height:auto"'
        text = text.replace("<svg ", f'<svg role="img" aria-label="{label}" {style} ', 1)
        if not caption:
            return text
        return f"<figure>{text}<figcaption>{html.escape(self.alt)}</figcaption></figure>"

    def page(self) -> str:
        """Return an HTML page with the picture that loads no other file."""
        from matplotlib.colors import to_hex

        paper = to_hex(self.figure.get_facecolor())
        ink = "#1A1A1A" if int(paper[1:3], 16) > 127 else "#F0F0EC"
        figure, code = self._responsive("p"), ""
        if self.views:
            shown = [
                (name, each._responsive(f"p{number}"))
                for number, (name, each) in enumerate(self.views)
            ]
            figure, code = switched(self.choice, shown), f"<script>\n{script()}</script>\n"
        return _PAGE.format(
            title=html.escape(self.title), figure=figure, paper=paper, ink=ink, style=STYLE,
            script=code, policy=POLICY,
        )  # fmt: skip

    def _responsive(self, key: str) -> str:
        """Return the wide and the narrow drawing, of which the page's style shows one.

        Args:
            key: Prefix of all ids. Both drawings have the same hatches, and browsers do not draw a
                hatch that is defined in a drawing that is not shown.
        """
        both = [("wide", self), *([("narrow", self.narrow())] if self.narrow else [])]
        if len(both) == 1:
            return _prefixed(self.inline(), key)
        return "".join(
            f'<div class="{kind}">{_prefixed(each.inline(), f"{key}-{kind}-")}</div>'
            for kind, each in both
        )

    def __repr__(self) -> str:
        return f"<Picture of {self.what}: {self.title}>"

    def _repr_html_(self) -> str:
        return self.inline()

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        with _settings(), _known_glyphs(self.figure):
            self.figure.savefig(
                out, format="png", dpi=DPI, facecolor=self.figure.get_facecolor(),
                metadata={"Software": "meshplan", "Title": _latin(self.title),
                          "Description": _latin(self.alt)},
            )  # fmt: skip
        return out.getvalue()


def _prefixed(text: str, prefix: str) -> str:
    """Put a prefix before all ids of an svg, and before all references to them."""
    return _REFERRED.sub(rf"\g<0>{prefix}", text)


def _titled(group: re.Match[str]) -> str:
    """Replace the id of an svg group by a `<title>`, which browsers show as a tooltip.

    Ids must be unique on a page, but several groups or pictures may have the same name.
    """
    name, more = group.groups()
    if _NUMBERED.fullmatch(name):
        return f"<g{more}>"
    return f"<g{more}><title>{name}</title>"


def check_target(path: Path) -> None:
    """Check that a picture can have this name, before it is drawn.

    Raises:
        SpecError: The suffix is not one of `SUFFIXES`, or the file cannot be written.
    """
    origin = Origin(str(path))
    if path.suffix.lower() not in SUFFIXES:
        kind = f"'{path.suffix}' is no picture format" if path.suffix else "the name has no suffix"
        fix = f"end the name in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise SpecError(Problem(kind, origin, fix))
    check_writable(path, "the picture")


def import_matplotlib() -> None:
    """Import matplotlib without the `matplotlibrc` of the working directory.

    matplotlib would read that file before any other, and the working directory may belong to a
    stranger. Therefore the working directory is "/" during the import. The file in the user's home,
    or the one that MATPLOTLIBRC names, is still read. Only the command line calls this: in a user's
    own program, a change of the working directory would disturb other threads.
    """
    if "matplotlib" in sys.modules:
        return
    here = os.open(os.curdir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(os.sep)
        try:
            importlib.import_module("matplotlib")
        finally:
            os.fchdir(here)
    finally:
        os.close(here)


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    with _SAVING:
        params: MutableMapping[str, Any] = matplotlib.rcParams  # type: ignore[assignment]
        before = {key: params[key] for key in _SVG}
        params.update(_SVG)
        try:
            yield
        finally:
            params.update(before)


@contextmanager
def _known_glyphs(figure: Figure) -> Iterator[None]:
    """Inside the context, let texts use fonts that have their characters; escape all others."""
    from matplotlib.text import Text

    before: list[tuple[Any, str]] = []
    for each in figure.findobj(Text):
        text = each.get_text()
        if text.isascii():
            continue
        each.set_fontfamily(families_of(text))
        if (known := drawable(text)) != text:
            before.append((each, text))
            each.set_text(known)
    try:
        yield
    finally:
        for each, text in before:
            each.set_text(text)


def _latin(text: str) -> str:
    """Escape characters that the text fields of a png cannot store."""
    return text.encode("latin-1", "backslashreplace").decode("latin-1")
