"""What the documents say is what happens. `python -m tests.test_docs [WORD]` refreshes the pages.

A block of a page under `<!-- file: PATH -->` is that file; one under `<!-- output: COMMAND -->` is
what the command prints, with `(exit 1)` behind a command whose answer is no. Behind either,
`| grep -E PATTERN`, `| head -N` and `| tail -N` pick lines. A table under `<!-- table: SECTION -->`
is of the keys of plan.yaml. At `<!-- generated: NAME -->`, the site has more than the page. Pages
are README.md and those of docs/.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml

from meshplan.cli.app import _parser
from tools.docs.reference import keys_table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(DOCS).with_suffix("")): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
}
"""Pages of docs/ by name, such as "how-to/first_plan"; each may quote files and outputs too."""
MAX_README_LINES = 180
SLOW = ("torchrun", "meshplan demo", "meshplan verify")
"""Commands that take more than a second or two."""

BLOCK = re.compile(r"<!-- (file|output): (.+?) -->\n```(\w*)\n(.*?)```", re.DOTALL)
TABLE = re.compile(r"<!-- table: (.+?) -->\n((?:\|.*\n)*)")
GENERATED = re.compile(r"<!-- generated: (\w+) -->")
NO = " (exit 1)"
"""Behind a command whose answer is no."""
PROGRAMS = {
    "meshplan": ["-c", "import sys; from meshplan.cli.app import main; sys.exit(main())"],
    "torchrun": ["-m", "torch.distributed.run"],
    "python": [],
}


def picked(text: str, filters: list[str]) -> str:
    """The lines of a text that pass every filter, in turn."""
    lines = text.splitlines(keepends=True)
    for words in map(shlex.split, filters):
        match words:
            case ["grep", "-E", pattern]:
                lines = [line for line in lines if re.search(pattern, line)]
            case ["head", count]:
                lines = lines[: -int(count)]
            case ["tail", count]:
                lines = lines[int(count) :]
            case _:
                raise ValueError(f"no filter: {words}")
    return "".join(lines)


def output_of(command: str) -> str:
    """What the command prints on stdout, run by this very Python, and picked by filters."""
    command, *filters = command.split(" | ")
    return picked(whole_output_of(command), filters)


@cache
def whole_output_of(command: str) -> str:
    program, *words = shlex.split(command.removesuffix(NO))
    done = subprocess.run(
        [sys.executable, *PROGRAMS[program], *words],
        cwd=ROOT,
        env=os.environ | {"NO_COLOR": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == int(command.endswith(NO)), done.stderr
    assert "UserWarning" not in done.stderr  # Such as another batch than the plan's.
    return done.stdout


def file_of(what: str) -> str:
    """The file, or the lines of it that are picked."""
    path, *filters = what.split(" | ")
    return picked((ROOT / path).read_text(), filters)


SOURCES: dict[str, Callable[[str], str]] = {
    "file": file_of,
    "output": output_of,
}


def blocks(kind: str) -> list[object]:
    return [
        pytest.param(what, text, id=what, marks=[pytest.mark.wide] * what.startswith(SLOW))
        for page in (README, *PAGES.values())
        for found, what, _, text in BLOCK.findall(page)
        if found == kind
    ]


@pytest.mark.parametrize(("what", "text"), blocks("file"))
def test_a_page_shows_the_file(what, text):
    assert text == file_of(what)


@pytest.mark.parametrize(("command", "text"), blocks("output"))
def test_a_page_shows_the_output(command, text):
    assert text == output_of(command)


@pytest.mark.parametrize(
    ("section", "text"), [found for page in PAGES.values() for found in TABLE.findall(page)]
)
def test_a_page_shows_the_table(section, text):
    assert text == keys_table(section)


def test_filters_pick_lines_as_in_a_shell():
    text = "ab\nb\nabc\nc\n"
    assert picked(text, ['grep -E "a|c"', "head -2"]) == "ab\nabc\n"
    assert picked(text, ["tail -3", "head -1"]) == "b\n"
    with pytest.raises(ValueError, match="no filter"):
        picked(text, ["sort"])


@pytest.mark.parametrize("name", ["README", *PAGES])
def test_every_marker_of_a_page_is_checked(name):
    page = PAGES.get(name, README)
    checked = len(BLOCK.findall(page))
    assert checked >= 7 * (name == "README")
    assert page.count("<!--") == sum(
        len(each.findall(page)) for each in (BLOCK, TABLE, GENERATED)
    )  # fmt: skip


@pytest.mark.parametrize("command", [what for kind, what, *_ in BLOCK.findall(README)
                                     if kind == "output"])  # fmt: skip
def test_a_reader_of_the_readme_sees_the_command_of_an_output(command):
    """Markers are not shown."""
    assert f"`{command.partition(' | ')[0]}`" in README


def test_the_readme_is_short():
    assert len(README.splitlines()) <= MAX_README_LINES
    assert max(len(text.splitlines()) for kind, _, _, text in BLOCK.findall(README)
               if kind == "output") <= 12  # fmt: skip


def test_both_loops_of_the_readme_train_alike():
    """Up to their steps they are one script, so that their losses can be compared."""
    setups = [file_of(f"examples/{name}.py").partition("for step")[0]
              for name in ("quickstart", "own_loop")]  # fmt: skip
    assert setups[0] == setups[1]


@pytest.mark.wide
def test_both_loops_of_the_readme_print_the_same_losses():
    run = "torchrun --nproc-per-node 8 --local-ranks-filter 0 examples/"
    assert output_of(f"{run}quickstart.py") == output_of(f"{run}own_loop.py")


def shell_lines(text: str) -> list[str]:
    return re.findall(r"```sh\n(.*?)\n```", text, re.DOTALL)


def test_two_commands_set_up_everything_and_ci_runs_the_second():
    demo, tests = shell_lines(README)
    for line in (demo, tests):
        assert line.startswith("python3 -m venv .venv && .venv/bin/pip install -q -c constraints")
    assert demo.endswith(" && .venv/bin/meshplan demo")
    assert tests.endswith(" && tools/test.sh")
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == tests
    assert shell_lines((ROOT / "CONTRIBUTING.md").read_text()) == [tests]


@pytest.mark.parametrize("path", [".ci/run", "tools/test.sh", "tools/pin.sh"])
def test_scripts_stop_at_the_first_failure(path):
    assert "\nset -euo pipefail\n" in (ROOT / path).read_text()
    assert os.access(ROOT / path, os.X_OK)


(VERBS,) = (each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
PARSERS = VERBS.choices
"""The parser of each verb."""
COMMAND = re.compile(r"(?:`|&& |output: |```sh\n)meshplan ([a-z]+)\b([^`\n|]*)")


@pytest.mark.parametrize("name", ["README", *PAGES])
def test_the_verbs_and_flags_of_a_page_exist(name):
    for verb, words in COMMAND.findall(PAGES.get(name, README)):
        flags = {flag for action in PARSERS[verb]._actions for flag in action.option_strings}
        named = {each.split("=")[0] for each in re.findall(r"(?<=\s)--?[a-z][\w-]*", words)}
        assert named <= flags, (verb, words)


def test_the_commands_page_has_every_verb_in_the_words_of_the_help():
    told = re.sub(r"\s+", " ", output_of("meshplan --help").partition("  VERB\n")[2])
    rows = re.findall(r"^\| `([a-z]+)` \| (.+?) \|", PAGES["reference/commands"], re.MULTILINE)
    assert told.strip() == " ".join(f"{verb} {says}" for verb, says in rows)


@pytest.mark.parametrize("name", ["README", *PAGES])
def test_the_yaml_of_a_page_is_a_plan(name, tmp_path):
    for text in re.findall(r"```yaml\n(.*?)```", PAGES.get(name, README), re.DOTALL):
        check_plan(text, tmp_path)


def check_plan(text, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    assert yaml.safe_load(text)["version"] == 1
    output_of(f"meshplan check -f {path}")


def test_contributing_stays_on_one_page():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60


def test_constraints_pin_exact_versions_of_everything_required():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    section = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]")[0]
    required = re.findall(r'"([\w-]+)', section)
    assert required
    assert set(required) <= set(pins)


LINK = re.compile(r"""\]\(([^)\s]+)|^\[[^]]+\]:\s*(\S+)|\b(?:src|href|srcset)=["']([^"']+)""", re.M)
"""Links and images, in Markdown and in the HTML that Markdown takes."""


def check_link(link: str) -> None:
    """Assert that a link into the repository's main branch leads to a file or folder of it."""
    repository = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    if link.startswith(f"{repository}/") and "/issues" not in link:
        kind, branch, path = link.removeprefix(f"{repository}/").split("/", 2)
        path = ROOT / path.partition("#")[0]
        assert branch == "main", link
        assert path.is_file() if kind == "blob" else kind == "tree" and path.is_dir(), link


def test_the_readme_links_as_an_index_shows_it():
    """An index of packages shows the page by itself: what is relative leads nowhere there."""
    links = ["".join(found) for found in LINK.findall(README)]
    assert len(links) >= 12
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    for link in links:
        check_link(link)


def slugs(text: str) -> set[str]:
    """The sections of a page, as links name them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_the_links_of_a_page_lead_to_files_and_sections(name):
    for link in ["".join(found) for found in LINK.findall(PAGES[name])]:
        if link.startswith("https://"):
            check_link(link)
        else:
            path, _, section = link.partition("#")
            target = (DOCS / name).parent / path if path else DOCS / f"{name}.md"
            assert target.is_file(), link
            assert not section or section in slugs(target.read_text()), link


def test_every_page_can_be_reached_from_the_readme():
    found, left = set(), {"README"}
    while left:
        name = left.pop()
        found.add(name)
        page = PAGES.get(name, README)
        ours = re.findall(r"/blob/main/docs/([\w/-]+)\.md", page)
        for path in re.findall(r"\]\(([\w./-]+)\.md\b", page) if name != "README" else []:
            target = (DOCS / name).parent / path
            ours.append(str(target.resolve().relative_to(DOCS)))
        left |= {each for each in ours if each in PAGES} - found
    assert found - {"README"} == PAGES.keys()


@pytest.mark.parametrize(
    "text", ["[a](docs/a.md)", "![a](a.png)", '<img src="a.png">', "[a]: docs/a.md"]
)
def test_a_relative_link_would_be_found(text):
    assert len(LINK.findall(text)) == 1


def test_hashed_requirements_pin_what_constraints_do_and_name_no_machine():
    """Written by tools/pin.sh."""
    text = (ROOT / "requirements-hashed.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pin, digest = r"[a-z0-9-]+==[\w.+!]+ \\", r"    --hash=sha256:[0-9a-f]{64}( \\)?"
    assert [line for line in lines if not re.fullmatch(f"{pin}|{digest}", line)] == []
    pinned = dict(re.findall(r"^(\S+)==(\S+) \\\n    --hash", text, re.MULTILINE))
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    wanted = dict(line.lower().split("==") for line in constraints if not line.startswith("#"))
    wanted = {re.sub(r"[-_.]+", "-", name): version for name, version in wanted.items()}
    assert wanted.items() <= pinned.items()
    assert "://" not in text


def files_of_the_repository() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).is_file()]


def places_of_a_machine(text: str, folder: Path = ROOT) -> list[str]:
    """Absolute paths that exist on one machine only, and paths that leave the repository.

    Args:
        text: Text of a file.
        folder: The folder of the file, from which its relative paths lead.
    """
    here = "|".join(re.escape(str(path)) for path in {ROOT, ROOT.parent, Path(sys.prefix)})
    somewhere = r"/(?:home|root|opt|mnt|srv|Users)(?=/)"
    found = re.findall(rf"(?<![\w./~-])(?:(?:{here})(?=/)|{somewhere}|\.\./\w[\w./-]*)", text)
    return [each for each in found if not (each[0] == "." and is_ours(folder / each))]


def is_ours(path: Path) -> bool:
    """Return True if a path leads to something in the repository."""
    return path.exists() and path.resolve().is_relative_to(ROOT)


def test_no_file_names_the_machine_it_was_written_on():
    found = {
        str(path.relative_to(ROOT)): places
        for path in files_of_the_repository()
        if (places := places_of_a_machine(path.read_text(errors="replace"), path.parent))
    }
    assert found == {}


@pytest.mark.parametrize("path", [str(ROOT / "x"), "/" + "home/me/x", ".." + "/beside/x"])
def test_a_machine_path_would_be_found(path):
    assert places_of_a_machine(f"see {path}.")


def refresh(word: str = "") -> None:
    """Write the real files and outputs into the pages, those whose marker has the word."""

    def real(found: re.Match[str]) -> str:
        kind, what, language, _ = found.groups()
        if word not in what:
            return found[0]
        return f"<!-- {kind}: {what} -->\n```{language}\n{SOURCES[kind](what)}```"

    def table(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{keys_table(found[1])}"

    (ROOT / "README.md").write_text(BLOCK.sub(real, README))
    for name, page in PAGES.items():
        (DOCS / f"{name}.md").write_text(TABLE.sub(table, BLOCK.sub(real, page)))


if __name__ == "__main__":
    refresh(*sys.argv[1:])


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_map_of_the_architecture_is_the_tree():
    """Every room has a row, and every folder, file and function that the page names is there."""
    package = ROOT / "meshplan"
    rooms = re.findall(r"^\| ((?:`[a-z]+/?` ?)+)\| (.+) \|$", ARCHITECTURE, re.MULTILINE)
    named = {name: says for names, says in rooms for name in re.findall(r"`([a-z]+/)`", names)}
    folders = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    assert named.keys() == folders
    for room, says in named.items():
        inner = set(re.findall(r"`([a-z_]+/)`", says))
        missing = {name for name in inner if not (package / room / name).is_dir()}
        assert not missing, (room, missing)
    for file, name in re.findall(r"`([a-z_/]+\.py)(?:::([\w.]+))?`", ARCHITECTURE):
        path = next(root / file for root in (package, ROOT) if (root / file).exists())
        if last := name.rpartition(".")[2]:
            assert re.search(rf"(def|class) {last}\b", path.read_text()), (file, name)
