"""Identity of a live model, on which its traces depend: its code, its modules, its forward.

A trace that is kept on disk may be used only for the model that was traced. Two models have one
identity if the same code, of the same versions, builds modules with equal attributes and tensors
whose forward runs the same operators. Code that is imported only while a backward runs is not seen.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import nn

from meshplan.assign.base.types import Reason
from meshplan.errors import Origin, Problem
from meshplan.model.flow import Flow
from meshplan.model.graph import ModelGraph
from meshplan.runtime.base.module_state import hooks_of, own_attributes
from meshplan.runtime.live.matches_config import OF_NO_STEP
from meshplan.shown import whole_repr
from meshplan.version import __version__

_DEPTH: Final = 5
"""Levels of nesting to which attributes are compared."""
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_REF: Final = re.compile(r"Ref\(value=(\d+)\)")
_PACKAGE: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """A live model and its environment, as hashes.

    Attributes:
        model: Qualified name of the model's class.
        versions: Versions of meshplan, Python, torch and the packages that the code imports.
        code: For each Python file of the model's own code, by module name, a hash of its content.
        modules: Hash of the modules' classes and tensors.
        attributes: Hash of the modules' other attributes and hooks, and of torch's global modes.
        forward: Hash of the recorded forward.
    """

    model: str
    versions: Mapping[str, str]
    code: Mapping[str, str]
    modules: str
    attributes: str
    forward: str

    @property
    def name(self) -> str:
        """The name of the model's class alone."""
        return self.model.rpartition(".")[2]

    def digest(self) -> str:
        """Return one hash of everything."""
        return hashed(json.dumps(asdict(self), sort_keys=True))

    def difference(self, other: ModelIdentity) -> str:
        """Return in words how another model differs from this one; "" if it does not.

        Each reads as the end of a sentence: "its code in mypkg.model has changed".
        """
        for name in sorted({*self.versions, *other.versions}):
            was, now = self.versions.get(name, "none"), other.versions.get(name, "none")
            if was != now:
                files = "the files of meshplan have changed"
                return files if name == "meshplan" else f"{name} was {was} and is {now}"
        changed = [name for name in sorted({*self.code, *other.code})
                   if self.code.get(name) != other.code.get(name)]  # fmt: skip
        if changed:
            return f"its code in {' and '.join(changed[:2])} has changed"
        if (self.model, self.modules) != (other.model, other.modules):
            return "its modules or tensors are others"
        if self.attributes != other.attributes:
            return "attributes of its modules have changed"
        return "" if self.forward == other.forward else "its forward runs other operators"


def identity_of(model: nn.Module, graph: ModelGraph, flow: Flow, entry: str = "") -> ModelIdentity:
    """Return the identity of a model.

    Args:
        model: The unsharded model of one process.
        graph: Its graph.
        flow: Its recorded forward.
        entry: "pkg.mod:function" that built it; "" if it has none.
    """
    classes = [type(module) for module in model.modules()]
    names = {each.__module__ for kind in dict.fromkeys(classes) for each in kind.__mro__}
    code, packages = _code_of({*names, *([entry.partition(":")[0]] if entry else [])})
    attributes = [
        (fqn, name, _spelled(value, _DEPTH))
        for fqn, module in model.named_modules()
        for name, value in sorted(own_attributes(module).items())
        if name not in OF_NO_STEP
    ]
    hooks = [
        _spelled(list(each.values()), 1) for module in model.modules() for each in hooks_of(module)
    ]
    backends = torch.backends.cuda
    modes = [get() for get in (
        backends.flash_sdp_enabled, backends.mem_efficient_sdp_enabled, backends.math_sdp_enabled,
        backends.cudnn_sdp_enabled, torch.are_deterministic_algorithms_enabled,
        torch.get_default_dtype, torch.is_autocast_enabled,
    )]  # fmt: skip
    return ModelIdentity(
        model=f"{type(model).__module__}.{type(model).__qualname__}",
        versions={**versions(), **packages},
        code=code,
        modules=hashed(repr([f"{kind.__module__}.{kind.__qualname__}" for kind in classes])
                        + repr(canonical((graph, graph.notes)))),
        attributes=hashed(repr((attributes, hooks, modes))),
        forward=hashed(_spelled_flow(flow)),
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions on which every trace depends."""
    return {
        "meshplan": f"{__version__} {_own_files()}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }


def canonical(value: Any) -> Any:
    """Return a value of meshplan's own types in a form whose `repr` is equal in every process.

    Reasons and places in files, which explain decisions, are left out; sets are sorted.
    """
    if isinstance(value, Reason | Origin | Problem):
        return None
    if is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value) if field.repr)
        return type(value).__name__, [(name, canonical(getattr(value, name))) for name in names]
    if isinstance(value, Mapping):
        return [(canonical(key), canonical(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [canonical(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(canonical(each)) for each in value)
    return value


def _code_of(names: set[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return (hash of each file by module, version by package) of these modules and their imports.

    A module outside of installed packages counts by its content, and what it imports counts, too;
    an installed package counts by its version.
    """
    code: dict[str, str] = {}
    packages: dict[str, str] = {}
    waiting = sorted(names)
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        top = name.partition(".")[0]
        if module is None or top in ("torch", "meshplan") or top in sys.stdlib_module_names:
            continue
        path = getattr(module, "__file__", None)
        if path is None or _is_installed(path):
            package = sys.modules.get(top, module)
            packages[top] = str(getattr(package, "__version__", "installed"))
            continue
        code[name] = _hash_of(path)
        new = {*_imported_by(module)} - seen
        seen |= new
        waiting += sorted(new)
    return code, packages


def _imported_by(module: ModuleType) -> Iterator[str]:
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            yield value.__name__
        else:  # Other objects may answer `__module__` in their own way, or not at all.
            owner = value if isinstance(value, type | FunctionType) else type(value)
            yield str(owner.__module__)


def _is_installed(path: str) -> bool:
    return path.startswith(_installed_in()) or "site-packages" in path or "dist-packages" in path


@cache
def _installed_in() -> tuple[str, ...]:
    return tuple(sysconfig.get_paths()[each] for each in ("stdlib", "platstdlib", "purelib"))


def _hash_of(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:  # In an archive, or removed since: no other file has this path either.
        return path


@cache
def _own_files() -> str:
    """Return a hash of the content of meshplan's own code."""
    found = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        found.update(path.relative_to(_PACKAGE).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _spelled(value: Any, depth: int) -> Any:
    """Return an attribute in a form whose `repr` is equal in every process that has an equal one.

    Tensors count by shape and dtype, functions and objects without attributes by their names.
    """
    if isinstance(value, _PLAIN):
        return value
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        return name, tuple(value.shape), str(value.dtype), value.requires_grad
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    if isinstance(value, nn.Module | ModuleType) or depth < 0:
        return name
    if isinstance(value, Mapping):
        return name, [(_spelled(k, 0), _spelled(each, depth - 1)) for k, each in value.items()]
    if isinstance(value, list | tuple):
        return name, [_spelled(each, depth - 1) for each in value]
    if isinstance(value, set | frozenset):
        return name, sorted(repr(_spelled(each, depth - 1)) for each in value)
    own = getattr(value, "__dict__", {})
    kept = ((key, each) for key, each in sorted(own.items()) if key not in OF_NO_STEP)
    return name, [(key, _spelled(each, depth - 1)) for key, each in kept]


def _spelled_flow(flow: Flow) -> str:
    """Return a recorded forward as text, with parameters and buffers by name.

    Their ids follow the order in which they were registered, and some models register buffers in
    the order of a set, which is another one in each process.
    """
    names = {each.id: each.name for each in flow.values if each.name}
    held = sorted(whole_repr(replace(each, id=-1)) for each in flow.values if each.name)
    others = [each for each in flow.values if not each.name]
    text = whole_repr((others, flow.ops, flow.calls, flow.changes))
    return repr(held) + _REF.sub(lambda ref: names.get(int(ref[1]), ref[0]), text)


def hashed(text: str) -> str:
    """Return a hash of a text, short enough for the name of a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
