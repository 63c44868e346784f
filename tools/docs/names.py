"""The public names of meshplan as Markdown: signatures and docstrings, read without an import.

Docstrings have the sections of Google's style (`Args:`, `Returns:`, `Raises:`) and doctests.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from meshplan import _ROOMS

_SECTION: Final = re.compile(r"^(Args|Returns|Yields|Raises):$")
_ENTRY: Final = re.compile(r"^(\*{0,2}[\w, .]+?): +(.*)$", re.DOTALL)
_GROUP: Final = re.compile(r"^    # (.+)$|^    \"(\w+)\": \"([\w.]+)\",$", re.MULTILINE)


def python_page(root: Path) -> str:
    """Return the public names in the groups and the order of `meshplan/__init__.py`."""
    source = (root / "meshplan" / "__init__.py").read_text(encoding="utf-8")
    lines: list[str] = []
    for title, name, module in _GROUP.findall(source):
        if title:
            lines += [f"## {title[0].upper()}{title[1:]}", ""]
        elif name != "__version__":
            lines += [*_section_of(name, _definition(name, module, root)), ""]
    return "\n".join(lines)


def documented_names() -> list[str]:
    """Return the names that `python_page` has a section for."""
    return [name for name in _ROOMS if name != "__version__"]


def _definition(name: str, module: str, root: Path) -> ast.FunctionDef | ast.ClassDef:
    """Return the function or class of that name, also where its module takes it from another."""
    path = root / Path(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            return _definition(name, str(node.module), root)
    raise LookupError(f"{module} does not define {name}")


def _section_of(name: str, node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    yield f"### `{name}` {{ #{name} }}"
    yield ""
    if isinstance(node, ast.FunctionDef):
        yield from _signature(node, f"meshplan.{name}")
        yield from docstring_to_markdown(ast.get_docstring(node) or "")
        return
    yield from docstring_to_markdown(ast.get_docstring(node) or "")
    yield from _members(node)


def _signature(node: ast.FunctionDef, name: str) -> list[str]:
    """Return the signature as a block of code, broken where it is long."""
    arguments = ast.unparse(node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    text = f"{name}({arguments}){returns}"
    if len(text) > 88:
        text = (
            f"{name}(\n" + "".join(f"    {each},\n" for each in _split(arguments)) + f"){returns}"
        )
    return ["```python", text, "```", ""]


def _split(arguments: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in arguments:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Yield a line for each public property and method."""
    rows = []
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            is_property = any("property" in ast.unparse(word) for word in each.decorator_list)
            says = (ast.get_docstring(each) or "").partition("\n\n")[0].replace("\n", " ")
            arguments = ", ".join(
                [word.arg for word in each.args.args if word.arg not in ("self", "cls")]
                + [f"{word.arg}=" for word in each.args.kwonlyargs]
            )
            name = each.name if is_property else f"{each.name}({arguments})"
            rows.append(f"| `{name}` | {says} |")
    if rows:
        yield from ("", "| attribute or method | |", "|---|---|", *rows)


def docstring_to_markdown(text: str) -> Iterator[str]:
    """Yield the lines of a docstring as Markdown."""
    section, block = "", list[str]()
    for line in [*text.splitlines(), "End:"]:
        heading = _SECTION.match(line)
        if heading or line == "End:" or (section and line and not line.startswith(" ")):
            yield from _section(section, block)
            section, block = (heading[1], []) if heading else ("", [line])
        else:
            block.append(line)


def _section(title: str, block: list[str]) -> Iterator[str]:
    text = textwrap.dedent("\n".join(block)).strip()
    if not text:
        return
    if not title:
        yield from _prose(text)
        return
    yield from ("", f"**{title}**", "")
    if title in ("Returns", "Yields"):
        yield from (text, "")
        return
    for entry in re.split(r"\n(?=\S)", text):
        flat = " ".join(entry.split())
        found = _ENTRY.match(flat)
        yield f"- `{found[1]}`: {found[2]}" if found else f"- {flat}"
    yield ""


def _prose(text: str) -> Iterator[str]:
    """Yield paragraphs, with doctests as blocks of code."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(">>>"):
            yield from ("", "```pycon", paragraph, "```", "")
        else:
            yield from (paragraph, "")
