"""Notebooks are run as their readers run them, and what they show is what happens now."""

from __future__ import annotations

import ast
import itertools
import json
import tempfile

import nbformat
import pytest

from tests.notebooks import NOTEBOOKS, run, texts

QUICK = ("1",)
"""Those that every change runs; `-m wide` runs the others."""
PUBLIC = {"meshplan", "sympy", "matplotlib"}


def named(path):
    marks = [] if path.name[0] in QUICK else [pytest.mark.wide]
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", [named(path) for path in NOTEBOOKS])
def test_a_notebook_shows_what_happens_now(path):
    assert texts(run(path)) == texts(nbformat.read(path, as_version=4))


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])
def test_a_notebook_is_small_and_whole(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 1_000_000
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs for cell in cells if _shows(cell.source))
    kinds = {out.output_type for cell in cells for out in cell.outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    # Whatever differs from machine to machine is no part of it.
    assert f"{tempfile.gettempdir()}/" not in path.read_text()
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert any("image/png" in out.get("data", {}) for cell in cells for out in cell.outputs)


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS])
def test_a_notebook_uses_public_names_only(path):
    import meshplan

    notebook = nbformat.read(path, as_version=4)
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= PUBLIC
            assert not any(alias.name.startswith("meshplan.") for alias in node.names)
        assert not isinstance(node, ast.ImportFrom)
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_")
            if isinstance(node.value, ast.Name) and node.value.id == "meshplan":
                assert node.attr in meshplan.__all__


def test_there_are_six_and_each_leads_to_the_next():
    assert [path.name[0] for path in NOTEBOOKS] == list("123456")
    for path, following in itertools.pairwise(NOTEBOOKS):
        last = json.loads(path.read_text())["cells"][-1]
        assert following.name in "".join(last["source"])


def _shows(source: str) -> bool:
    """Whether a cell prints, or ends with a value."""
    tree = ast.parse(source)
    return "print(" in source or isinstance(tree.body[-1], ast.Expr)
