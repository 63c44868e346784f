"""What the documents say is what happens. `python -m tests.test_docs [WORD]` refreshes README.md.

A block of README.md under `<!-- file: PATH -->` is that file; one under `<!-- output: COMMAND -->`
is what the command prints.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SLOW = ("torchrun",)
"""Commands that take more than a second or two."""

BLOCK = re.compile(r"<!-- (file|output): (.+?) -->\n```(\w*)\n(.*?)```", re.DOTALL)
PROGRAMS = {
    "meshplan": ["-c", "import sys; from meshplan.cli.app import main; sys.exit(main())"],
    "torchrun": ["-m", "torch.distributed.run"],
    "python": [],
}


def output_of(command: str) -> str:
    """What the command prints on stdout, run by this very Python."""
    command, _, pattern = command.partition(" | grep -E ")
    program, *words = shlex.split(command)
    done = subprocess.run(
        [sys.executable, *PROGRAMS[program], *words],
        cwd=ROOT,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "100", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr  # Such as another batch than the plan's.
    lines = done.stdout.splitlines(keepends=True)
    return "".join(line for line in lines if re.search(shlex.split(pattern or "''")[0], line))


SOURCES: dict[str, Callable[[str], str]] = {
    "file": lambda path: (ROOT / path).read_text(),
    "output": output_of,
}


def blocks(kind: str) -> list[object]:
    return [
        pytest.param(what, text, id=what, marks=[pytest.mark.wide] * what.startswith(SLOW))
        for found, what, _, text in BLOCK.findall(README)
        if found == kind
    ]


@pytest.mark.parametrize(("path", "text"), blocks("file"))
def test_the_readme_shows_the_file(path, text):
    assert text == (ROOT / path).read_text()


@pytest.mark.parametrize(("command", "text"), blocks("output"))
def test_the_readme_shows_the_output(command, text):
    assert text == output_of(command)


def test_every_marker_of_the_readme_is_checked():
    assert README.count("<!--") == len(BLOCK.findall(README)) >= 3


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


@pytest.mark.parametrize(
    "verb", sorted(set(re.findall(r"(?:`|/|output: )meshplan ([a-z]+)\b", README)))
)
def test_the_verbs_of_the_readme_exist(verb):
    assert verb in output_of(f"meshplan {verb} --help")


def test_the_yaml_of_the_readme_is_a_plan(tmp_path):
    [text] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
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


def test_the_readme_links_as_an_index_shows_it():
    """An index of packages shows the page by itself: what is relative leads nowhere there."""
    repository = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    links = ["".join(found) for found in LINK.findall(README)]
    assert len(links) >= 12
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    for link in links:
        if link.startswith(f"{repository}/") and "/issues" not in link:
            kind, branch, path = link.removeprefix(f"{repository}/").split("/", 2)
            path = ROOT / path.partition("#")[0]
            assert branch == "main", link
            assert path.is_file() if kind == "blob" else kind == "tree" and path.is_dir(), link


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


def places_of_a_machine(text: str) -> list[str]:
    """Absolute paths that exist on one machine only, and paths that leave the repository."""
    here = "|".join(re.escape(str(path)) for path in {ROOT, ROOT.parent, Path(sys.prefix)})
    somewhere = r"/(?:home|root|opt|mnt|srv|Users)(?=/)"
    return re.findall(rf"(?<![\w./~-])(?:(?:{here})(?=/)|{somewhere}|\.\./\w+)", text)


def test_no_file_names_the_machine_it_was_written_on():
    found = {
        str(path.relative_to(ROOT)): places
        for path in files_of_the_repository()
        if (places := places_of_a_machine(path.read_text(errors="replace")))
    }
    assert found == {}


@pytest.mark.parametrize("path", [str(ROOT / "x"), "/" + "home/me/x", ".." + "/beside/x"])
def test_a_machine_path_would_be_found(path):
    assert places_of_a_machine(f"see {path}.")


def refresh(word: str = "") -> None:
    """Write the real files and outputs into README.md, those whose marker has the word."""

    def real(found: re.Match[str]) -> str:
        kind, what, language, _ = found.groups()
        if word not in what:
            return found[0]
        return f"<!-- {kind}: {what} -->\n```{language}\n{SOURCES[kind](what)}```"

    (ROOT / "README.md").write_text(BLOCK.sub(real, README))


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
