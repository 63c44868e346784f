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
        shown
        version errors units garbage own_process two_cores kernels
        files layout
        spec
        launch interop.configs
        model
        assign.base textbook wrappers
        assign.tensor_parallel assign.axes
        assign.units assign.auto
        assign
        plan
        state
        memory.log
        memory.tape memory.answer
        memory.decoder memory.replay memory.stages
        memory.repeat
        memory.analytic
        memory traffic
        plan.verdict cost
        planner.space planner.knapsack
        planner.tables planner.lock
        planner.solve
        planner.problem
        planner.objectives
        planner.answers
        planner
        pictures.base
        pictures.graphs pictures.mesh
        pictures.memory pictures.plans
        pictures
        render.base
        render.layouts
        render.memory
        render.plans
        render runtime.base runtime.demo_model
        runtime.torch_private runtime.calibrate runtime.demo_moe
        runtime.trace runtime.watch runtime.checks
        runtime.apply.loss
        runtime.apply.tensor_parallel
        runtime.apply.experts runtime.apply.data
        runtime.apply.parameters
        runtime.apply
        runtime.comparisons
        runtime.train
        runtime.state
        runtime.fake_step
        runtime.estimate
        runtime.live
        runtime.parallelize
        runtime.verify runtime.demo runtime.doctor runtime.local_nodes
        runtime
        report
        interop
        api
        cli
        __init__
        __main__
    """.strip().splitlines()
]
"""Rooms from the ground up; a room imports itself and rooms on lower lines.

A module belongs to the room with the longest name that its own name begins with.
"""

ROOM_LEVELS = {name: number for number, line in enumerate(LEVELS) for name in line}

TORCH_ROOMS = {"runtime", "interop"}
HEAVY = {"torch", "transformers", "lightning"}
LATE = {"torch", "sympy", "networkx", "matplotlib", "rich", "yaml", "re2"}
"""What a function may import, because start-up must not pay for it."""

LATE_BETWEEN = {
    ("__init__", "importlib"),  # it resolves the public names when they are asked for
    ("shown", "importlib"),  # as `__init__`, of the views that values have of themselves
    ("plan", "pictures"),  # upward, for a type alone
    ("api", "spec"),  # yaml
    ("api", "memory"),  # what answers one question only
    ("api", "plan"),
    ("api", "planner"),
    ("api", "cost"),
    ("api", "runtime"),
    ("api", "interop"),
    ("api", "ipywidgets"),  # an extra
    ("interop", "accelerate"),  # as above
    ("interop", "transformers"),
    ("runtime", "planner"),
    ("cli", "api"),  # numpy
    ("cli", "launch"),
    ("cli", "memory"),  # what one verb needs only
    ("cli", "pictures"),
    ("cli", "plan"),
    ("cli", "planner"),
    ("cli", "render"),
    ("cli", "report"),
    ("cli", "runtime"),
    ("cli", "spec"),
}
"""What functions of one room may import besides: rooms that need something of LATE themselves.
What a notebook shows of a value is drawn far above it, and found by `shown`."""

MAX_LINES = 500
"""A file is a topic of about 400 lines."""


def room_of(module: str) -> str | None:
    """The room of a module, both named from below `meshplan`; None if it has no level."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in ROOM_LEVELS), None)


def complaints(module: str, source: str) -> Iterator[str]:
    """Everything that is wrong with the imports of a module, named from below `meshplan`."""
    room = room_of(module)
    if room is None:
        yield f"{module} has no level"
        return
    top_room = room.split(".")[0]
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
            other = room_of(rest or "__init__")
            other_top = (other or "").split(".")[0]
            says = f"line {getattr(node, 'lineno', 0)}: {room} imports {target}"
            if not top:
                yield f"{says}: write the whole name"
            elif top != "meshplan":
                if top in HEAVY and top_room not in TORCH_ROOMS and node not in type_only:
                    yield f"{says}: only {sorted(TORCH_ROOMS)} know it"
                is_late = top in LATE or (top_room, top) in LATE_BETWEEN
                if node in in_function and not is_late:
                    yield f"{says} inside a function"
            elif other is None:
                yield f"{says}, which has no level"
            elif other != room and ROOM_LEVELS[other] >= ROOM_LEVELS[room]:
                is_late = node in in_function or node in type_only
                if not is_late or (top_room, other_top) not in LATE_BETWEEN:
                    yield f"{says} upward"
            elif (
                node in in_function
                and other_top != top_room
                and (top_room, other_top) not in LATE_BETWEEN
            ):
                yield f"{says} inside a function"


def _imported(node: ast.AST) -> list[str]:
    """Dotted names that the node imports; a name from a package may be a room or a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        names = [f"{module}.{alias.name}" for alias in node.names]
        if module == "meshplan":
            return [name if room_of(name.partition(".")[2]) else module for name in names]
        if (PACKAGE.parent / module.replace(".", "/")).is_dir():
            return names
        return [module]
    return []


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_and_the_file_is_short(path):
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    source = path.read_text()
    assert list(complaints(module.removesuffix(".__init__"), source)) == []
    assert len(source.splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("layout", "from meshplan.assign import assign", "imports meshplan.assign.assign upward"),
        ("planner.tables.build", "from meshplan.planner import answers", "answers upward"),
        ("layout", "import meshplan.cli.app", "imports meshplan.cli.app upward"),
        ("layout", "from meshplan import render", "imports meshplan.render upward"),
        ("layout", "from meshplan import Mesh", "imports meshplan upward"),
        (
            "layout",
            "from meshplan.model.graph import ModelGraph",
            "imports meshplan.model.graph upward",
        ),
        (
            "render",
            "from meshplan.runtime.base.mesh import x",
            "imports meshplan.runtime.base.mesh upward",
        ),
        ("assign", "import torch", "only ['interop', 'runtime'] know it"),
        ("assign", "def f():\n import torch.nn", "only ['interop', 'runtime'] know it"),
        ("assign", "def f():\n import json", "imports json inside a function"),
        ("plan", "def f():\n from meshplan import layout", "meshplan.layout inside a function"),
        ("assign", "from .types import Assignment", "write the whole name"),
        ("plan", "from meshplan.cellar import wine", "has no level"),
        ("cellar", "", "cellar has no level"),
    ],
)
def test_the_checker_finds(module, source, complaint):
    assert complaint in "\n".join(complaints(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("assign", "from meshplan.layout.layout import Layout\nimport json"),
        ("assign", "from meshplan.assign.base.types import Assignment"),
        ("runtime", "import torch"),
        ("model.graph", "def f():\n import networkx"),
        ("api", "def f():\n from meshplan.runtime.parallelize import parallelize"),
        ("api", "if TYPE_CHECKING:\n from torch import nn"),
    ],
)
def test_the_checker_allows(module, source):
    assert list(complaints(module, source)) == []


def test_estimate_starts_without_anything_heavy():
    script = (
        "import sys; from meshplan.cli.app import main\n"
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
        "import sys; from meshplan.cli.app import main\n"
        "code = main(['plan', '-f', sys.argv[1], '--dry-run', '--json'])\n"
        "late = {'torch', 'sympy', 'networkx', 'matplotlib', 'numpy.ma', 'meshplan.traffic',\n"
        "        'meshplan.planner.answers.explain',\n"
        "        'meshplan.planner.answers.infeasible'} & set(sys.modules)\n"
        "sys.exit(f'exit code {code}, imported {late}' if code or late else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "plan.yaml")],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_class_name_has_one_sense():
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
