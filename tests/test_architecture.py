"""The shape of the house: imports go strictly downward, and torch stays in two rooms.

The order is the whole architecture on one page. A new module gets a level here first.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "meshplan"

LEVELS = [
    line.split()
    for line in """
        version errors units dtypes collecting cores
        files mesh hardware recipes schedules optimizers
        trust
        layout flow spec styles heads
        rehearsal keys
        graph dims
        relay match borrow agreement compatibility
        strategies
        values
        rules source
        schema
        blueprint reader assign formulas
        solve sizing
        plan
        restrict
        memory
        cost
        traffic
        verdict
        planner
        pictures
        render runtime
        report
        interop in_force
        api planning verbs
        reporting exploring retargeting
        cli_planning cli_diff cli_draw cli_report cli_trust
        cli __init__
        __main__
    """.strip().splitlines()
]
"""Rooms from the ground up; a room imports itself and rooms on lower lines."""

TORCH_ROOMS = {"runtime", "interop"}
HEAVY = {"torch", "transformers", "lightning"}
LATE = {"torch", "sympy", "networkx", "matplotlib", "rich", "yaml", "re2"}
"""What a function may import, because start-up must not pay for it."""

LATE_BETWEEN = {
    ("__init__", "importlib"),  # it resolves the public names when they are asked for
    ("layout", "pictures"),  # upward: values show themselves
    ("spec", "pictures"),
    ("memory", "pictures"),
    ("plan", "pictures"),
    ("in_force", "planner"),  # numpy
    ("in_force", "runtime"),
    ("api", "reader"),  # yaml
    ("api", "memory"),  # what answers one question only
    ("api", "plan"),
    ("api", "planner"),
    ("api", "runtime"),
    ("api", "verdict"),
    ("api", "interop"),
    ("exploring", "ipywidgets"),  # an extra
    ("runtime", "planner"),
    ("planning", "runtime"),
    ("planning", "planner"),  # what answers one question only
    ("cli_planning", "planning"),  # numpy
    ("cli_planning", "render"),
    ("cli_planning", "planner"),
    ("cli_planning", "reader"),
    ("cli_planning", "retargeting"),
    ("cli_diff", "planning"),
    ("cli_diff", "planner"),
    ("cli_diff", "render"),
    ("cli_draw", "memory"),
    ("cli_draw", "pictures"),
    ("cli_draw", "planning"),
    ("cli_draw", "reader"),
    ("cli_draw", "render"),
    ("cli_trust", "reader"),
    ("cli_report", "pictures"),
    ("cli_report", "report"),
    ("cli_report", "reporting"),
    ("cli", "memory"),
    ("cli", "reader"),
    ("cli", "render"),
    ("cli", "runtime"),
}
"""What functions of one room may import besides: rooms that need something of LATE themselves.
Here alone an import may go upward: what a notebook shows of a value is drawn far above it."""

MAX_LINES = 400


def complaints(room: str, source: str) -> Iterator[str]:
    """Everything that is wrong with the imports of a file of this room."""
    level = {name: number for number, line in enumerate(LEVELS) for name in line}
    if room not in level:
        yield f"{room} has no level"
        return
    tree = ast.parse(source)
    type_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for node in ast.walk(block)
    }
    in_function = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        for target in _imported(node):
            top, _, rest = target.partition(".")
            other = rest.split(".")[0] or "__init__"
            says = f"line {getattr(node, 'lineno', 0)}: {room} imports {target}"
            if not top:
                yield f"{says}: write the whole name"
            elif top != "meshplan":
                if top in HEAVY and room not in TORCH_ROOMS and node not in type_only:
                    yield f"{says}: only {sorted(TORCH_ROOMS)} know it"
                if node in in_function and top not in LATE and (room, top) not in LATE_BETWEEN:
                    yield f"{says} inside a function"
            elif other not in level:
                yield f"{says}, which has no level"
            elif other != room and level[other] >= level[room]:
                is_late = node in in_function or node in type_only
                if not is_late or (room, other) not in LATE_BETWEEN:
                    yield f"{says} upward"
            elif node in in_function and (room, other) not in LATE_BETWEEN:
                yield f"{says} inside a function"


def _imported(node: ast.AST) -> list[str]:
    """Dotted names that the node imports; a name from the package itself may be a room."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        rooms = [f"{module}.{alias.name}" for alias in node.names]
        known = {name for line in LEVELS for name in line}
        if module == "meshplan":
            return [name if name.partition(".")[2] in known else module for name in rooms]
        return [module]
    return []


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_and_the_file_is_short(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    source = path.read_text()
    assert list(complaints(room, source)) == []
    assert len(source.splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("room", "source", "complaint"),
    [
        ("layout", "from meshplan.assign import assign", "imports meshplan.assign upward"),
        ("layout", "import meshplan.cli", "imports meshplan.cli upward"),
        ("layout", "from meshplan import render", "imports meshplan.render upward"),
        ("layout", "from meshplan import Mesh", "imports meshplan upward"),
        ("layout", "from meshplan.graph import ModelGraph", "imports meshplan.graph upward"),
        ("render", "from meshplan.runtime.mesh import x", "imports meshplan.runtime.mesh upward"),
        ("assign", "import torch", "only ['interop', 'runtime'] know it"),
        ("assign", "def f():\n import torch.nn", "only ['interop', 'runtime'] know it"),
        ("assign", "def f():\n import json", "imports json inside a function"),
        ("plan", "def f():\n from meshplan import mesh", "meshplan.mesh inside a function"),
        ("assign", "from .types import Assignment", "write the whole name"),
        ("plan", "from meshplan.cellar import wine", "has no level"),
        ("cellar", "", "cellar has no level"),
    ],
)
def test_the_checker_finds(room, source, complaint):
    assert complaint in "\n".join(complaints(room, source))


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("assign", "from meshplan.layout import Layout\nimport json"),
        ("assign", "from meshplan.assign.types import Assignment"),
        ("runtime", "import torch"),
        ("graph", "def f():\n import networkx"),
        ("api", "def f():\n from meshplan.runtime.parallelize import parallelize"),
        ("api", "if TYPE_CHECKING:\n from torch import nn"),
    ],
)
def test_the_checker_allows(room, source):
    assert list(complaints(room, source)) == []


def test_estimate_starts_without_anything_heavy():
    script = (
        "import sys; from meshplan.cli import main\n"
        "code = main(['estimate', '--params', '3e9', '--gpus', '8', '--json'])\n"
        "heavy = {'torch', 'numpy', 'sympy', 'networkx', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'exit code {code}, imported {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_plan_is_searched_without_what_answers_other_questions(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 128,
        "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = {
        "version": 1, "model": {"config": "config.json"}, "mesh": "auto", "strategy": "auto",
        "precision": "bf16-mixed", "batch": {"global": 8, "seq_len": 64},
        "hardware": {"nodes": 1, "gpus_per_node": 2, "gpu": "h100-sxm-80gb"},
    }  # fmt: skip
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    script = (
        "import sys; from meshplan.cli import main\n"
        "code = main(['plan', '-f', sys.argv[1], '--dry-run', '--json'])\n"
        "late = {'torch', 'sympy', 'networkx', 'matplotlib', 'numpy.ma', 'meshplan.traffic',\n"
        "        'meshplan.planner.explain', 'meshplan.planner.remedy'} & set(sys.modules)\n"
        "sys.exit(f'exit code {code}, imported {late}' if code or late else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "plan.yaml")],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
