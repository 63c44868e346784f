"""Packages that are missing, or lack one that they need, are told with what to install.

Which seeded bug would this catch? A bare ModuleNotFoundError of a package that the user has never
named, and a package that is called missing although one that it needs is.
"""

from __future__ import annotations

import pytest

from tests.helpers.commands import output_of

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[dev]'")
pytest.importorskip("lightning", reason="lightning is not installed: pip install -e '.[lightning]'")

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Without(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
import meshplan
try:
    exec(sys.argv[2])
except meshplan.ApplyError as error:
    print(error)
"""
LIGHTNING = "import meshplan.interop.lightning"
ACCELERATE = "import meshplan.interop.accelerate"
TRAINER = "meshplan.trainer(int)"


@pytest.mark.parametrize(
    ("package", "code", "what", "fix"),
    [
        ("lightning", LIGHTNING, "needs the package lightning, which is not installed",
         "pip install 'meshplan[lightning]'"),
        ("torchmetrics", LIGHTNING, "needs the package lightning, which is installed but cannot be",
         "pip install torchmetrics, or pip install --force-reinstall 'meshplan[lightning]'"),
        ("accelerate", ACCELERATE, "needs the package accelerate, which is not installed",
         "pip install accelerate"),
        pytest.param(
            "accelerate", TRAINER, "meshplan.trainer needs the package accelerate, which is not",
            "pip install 'meshplan[hf]' accelerate", marks=pytest.mark.wide,
        ),
        ("safetensors", TRAINER, "the package accelerate, which is installed but cannot be",
         "pip install safetensors, or pip install"),
    ],
)  # fmt: skip
def test_what_to_install(tmp_path, package, code, what, fix):
    (tmp_path / "without.py").write_text(WITHOUT)
    _, out, errors = output_of("without", package, code, folder=tmp_path)
    assert what in out, errors
    assert fix in out


def test_a_class_with_a_plan_takes_no_other():
    from transformers import Trainer

    import meshplan

    made = meshplan.trainer(Trainer)
    with pytest.raises(meshplan.ApplyError, match="PlannedTrainer is a class that meshplan") as e:
        meshplan.trainer(made)
    assert "use it as it is: it takes plan=" in str(e.value)
