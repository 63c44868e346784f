"""The documentation site is built without a warning, and its reference is what the code has.

Which seeded bug would this catch? A verb, a public name, a GPU or a message that no page has; a
link that leads nowhere; a page that loads something from elsewhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import meshplan
from meshplan.cli.app import VERBS
from meshplan.layout.hardware import devices
from tools.docs.messages import HOLE, collect
from tools.docs.names import docstring_to_markdown
from tools.docs.notebooks import notebook_to_markdown
from tools.docs.pages import copied_pages, with_blank_lines, with_links_of_the_site
from tools.docs.reference import gpus_part, messages_part, untitled_rooms

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "meshplan"
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "srcset"}
"""Attributes by which a page loads a file."""


class _Page(HTMLParser):
    """What a page links to, what it loads, and which places it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.loads, self.ids = set[str](), set[str](), {""}
        self.paragraphs: list[str] = []
        self._is_paragraph = False
        self.feed(text)

    def handle_data(self, data: str) -> None:
        if self._is_paragraph:
            self.paragraphs[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._is_paragraph &= tag != "p"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        if tag == "p":
            self._is_paragraph = True
            self.paragraphs.append("")
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if LOADS.get(tag) in given and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.add(given[LOADS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[str, _Page]:
    """The built pages, by path."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        # The theme prints which tools will succeed it.
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return {
        str(path.relative_to(folder)): _Page(path.read_text(encoding="utf-8"))
        for path in folder.rglob("*.html")
    }


def test_the_site_has_every_page(site):
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    pages |= set(copied_pages(ROOT).values())
    assert {path.replace(".html", ".md") for path in site} == pages | {"404.md"}


def test_every_link_of_the_site_leads_somewhere(site):
    lost = []
    for path, page in site.items():
        for link in page.links if path != "404.html" else ():
            if re.match(r"[a-z]+:", link):
                continue
            target, _, section = link.partition("#")
            to = str(Path("/", path).parent.joinpath(target).resolve())[1:] if target else path
            if to.endswith(".html") or not target:
                if to not in site or section not in site[to].ids:
                    lost.append((path, link))
            else:
                assert (ROOT / "docs" / to).exists(), (path, link)
    assert lost == []


def test_lists_and_tables_are_not_shown_as_text(site):
    """GitHub needs no blank line before them, and mkdocs does."""
    shown = [text for page in site.values() for text in page.paragraphs]
    assert len(shown) > 300
    assert [text for text in shown if re.search(r"^(?:- |\d+\. |\|.*\|$|```)", text, re.M)] == []


def test_pages_load_nothing_from_elsewhere(site):
    loads = {each for page in site.values() for each in page.loads}
    assert [each for each in loads if re.match(r"[a-z]+:|//", each)] == []
    assert any(each.endswith("gallery/gantt.png") for each in loads)


def test_the_reference_has_every_name_verb_and_gpu(site):
    assert set(meshplan.__all__) - {"__version__"} <= site["reference/python.html"].ids
    assert {verb.name for verb in VERBS} <= site["reference/commands.html"].ids
    listed = re.findall(r"^\| `([\w-]+)` \|", gpus_part(), re.MULTILINE)
    assert listed == list(devices())


def pattern(text: str) -> re.Pattern[str]:
    """What a message looks like once its holes are filled."""
    return re.compile(".+".join(map(re.escape, text.split(HOLE))), re.DOTALL)


def test_the_messages_of_bad_plans_are_among_those_collected():
    """What is printed for a real mistake is found by its words."""
    patterns = [pattern(message.what) for message in collect(PACKAGE)]
    printed = [
        what
        for path in sorted((ROOT / "tests" / "bad_plans").glob("*.txt"))
        for what in re.findall(r"^\S+:\d+:\d+: (?:[\w.\[\]-]+: )?(.+)$", path.read_text(), re.M)
    ]
    assert len(printed) > 50
    lost = [what for what in printed if not any(each.fullmatch(what) for each in patterns)]
    # This one is put together from a list, and has no words but "is not" of its own.
    assert lost == ["32 is not micro 4 x accumulate 2 x 8 data ranks = 64"]


SOURCE = """
ADVICE = "call somebody"

class Reader:
    def refuse(self, what, fix):
        self.problems.append(Problem(what, None, fix))

    def read(self, name, count):
        if name == "a":
            what = "the first of both branches"
            fix = "take the second"
        else:
            what = f"the second, which names {name}"
            fix = ADVICE
        problem = Problem(what, Origin("--name"), fix)
        self.refuse("a text that goes through a function", f"{ADVICE}, twice")
        what = "what was there before is gone"
        if count:
            what += " except what was added"
        raise PlanError(Problem(what, spec.origin("mesh"), fix=noun(count)))


def noun(count) -> str:
    return "one more for each" if count == 1 else "several more for each"
"""


def test_messages_are_followed_through_branches_constants_and_functions(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "reader.py").write_text(SOURCE)
    found = {(message.where, message.what, message.fix) for message in collect(package)}
    assert found == {
        ("--name", "the first of both branches", "take the second"),
        ("--name", f"the second, which names {HOLE}", "call somebody"),
        ("", "a text that goes through a function", "call somebody, twice"),
        *(
            ("mesh", f"what was there before is gone{more}", f"{number} for each")
            for more in ("", " except what was added")
            for number in ("one more", "several more")
        ),
    }


def test_nearly_every_message_has_a_fix_and_every_room_a_title():
    messages = collect(PACKAGE)
    assert len(messages) > 500
    assert sum(not message.fix for message in messages) < 0.1 * len(messages)
    assert untitled_rooms(PACKAGE) == set()
    assert messages_part(PACKAGE).count("<dt>") > 500


def test_a_docstring_becomes_markdown():
    text = 'Do it.\n\nArgs:\n    a: First,\n        on two lines.\n    b, c: Both.\n\n>>> f("x")\n1'
    lines = list(docstring_to_markdown(text))
    assert lines[0] == "Do it."
    assert "- `a`: First, on two lines." in lines
    assert "- `b, c`: Both." in lines
    assert lines[lines.index("```pycon") + 1] == '>>> f("x")\n1'


def test_a_notebook_has_its_pictures_and_outputs():
    path = ROOT / "notebooks" / "1_which_strategy.ipynb"
    page, pictures = notebook_to_markdown(path)
    assert page.startswith("# 1. ")
    assert len(pictures) == page.count("](1_which_strategy_") >= 3
    assert all(data.startswith(b"\x89PNG") for data in pictures.values())
    assert "```text\n" in page


def test_blank_lines_come_before_lists_and_tables():
    text = "a\n- b\n  c\n- d\n\n1. e\nf\n| g |\n|---|\n```\nh\n- i\n```\n"
    wanted = "a\n\n- b\n  c\n- d\n\n1. e\nf\n\n| g |\n|---|\n```\nh\n- i\n```\n"
    assert with_blank_lines(text) == with_blank_lines(wanted) == wanted


REPOSITORY = "https://github.com/meshplan/meshplan"


@pytest.mark.parametrize(
    ("source", "link", "wanted"),
    [
        ("README.md", f"{REPOSITORY}/blob/main/docs/a/b.md#c", "a/b.md#c"),
        ("docs/a/b.md", f"{REPOSITORY}/blob/main/README.md", ".." + "/index.md"),
        ("docs/a/b.md", f"{REPOSITORY}/tree/main/plans", f"{REPOSITORY}/tree/main/plans"),
        ("README.md", "plans", f"{REPOSITORY}/tree/main/plans"),
        ("docs/a/b.md", "c.png", "c.png"),
        ("docs/a/b.md", "#here", "#here"),
        ("README.md", f"{REPOSITORY}/issues", f"{REPOSITORY}/issues"),
    ],
)
def test_links_lead_to_pages_of_the_site(source, link, wanted):
    places = {"README.md": "index.md", "docs/a/b.md": "a/b.md"}
    text = f"[x]({link})\n```\n[x]({REPOSITORY}/blob/main/README.md)\n```"
    moved = with_links_of_the_site(text, source, places, ROOT)
    assert moved == text.replace(f"[x]({link})\n", f"[x]({wanted})\n", 1)
