"""`meshplan.explore`: sliders next to the pictures of a plan, in a notebook."""

from __future__ import annotations

import base64
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Final, Unpack

from meshplan.api import checking
from meshplan.api.in_force import find_model, is_built, spec_in_force
from meshplan.api.source import PlanSource, Source, SourceArguments
from meshplan.errors import Origin, Problem, SpecError
from meshplan.model.blueprint import from_config
from meshplan.model.rehearsal import Rehearser
from meshplan.pictures.base.palette import theme_of
from meshplan.pictures.explored import Knobs, Scene, knobs_of, png_of, scene_of
from meshplan.pictures.mesh.counted import counted_plan
from meshplan.plan.plan import Plan, make_plan
from meshplan.spec.spec import Spec
from meshplan.spec.strategies import STRATEGIES
from meshplan.textbook.inputs import graph_of

_WIDGETS: Final = "For sliders, pip install 'ipywidgets>=8' and run this again."
_STILL: Final = "A still picture: a running notebook shows sliders here."
_KEPT: Final = 64
"""Number of recent settings whose pictures are cached, so that going back takes no time."""


def explore(
    plan: PlanSource | Spec | Plan,
    overrides: Sequence[str] = (),
    *,
    theme: str = "light",
    **given: Unpack[SourceArguments],
) -> Explorer:
    """Show a plan's mesh and memory with sliders for nodes, GPUs, micro batch, strategy, tp and pp.

    Args:
        plan: Path of a plan file, its content as a mapping, or the result of `load_spec` or
            `decide`.
        overrides: `KEY=VALUE` statements that change the plan; not with a `Plan` or a `Spec`.
        theme: "light" or "dark".
        given: The model and the machine, by the names of `Source`: `model`, `config`, `gpu` and
            `memory`. A `Plan` has its model already: leave `model` and `config` out.

    Returns:
        An object that a notebook shows as sliders if ipywidgets is installed, else as a picture.

    Raises:
        SpecError: The plan or the model cannot be read, or no model is named.
        PlanError: The plan, before any slider is moved, does not suit the model.
    """
    theme_of(theme)
    # `_start` reads no plan file if it gets a Plan or a Spec, so the source needs no content.
    source = Source({} if isinstance(plan, Plan | Spec) else plan, tuple(overrides), **given)
    start, rehearse = _start(plan, source)
    return Explorer(start, gpu=source.gpu, memory=source.memory, theme=theme, rehearse=rehearse)


def _start(plan: PlanSource | Spec | Plan, source: Source) -> tuple[Plan, Rehearser | None]:
    """Return the plan before any slider is moved, and its `rehearse` argument of `make_plan`.

    The latter is None unless the model is a Python function.
    """
    if isinstance(plan, Plan | Spec) and source.overrides:
        what = "overrides change a plan file, not a Plan or Spec that was already read"
        raise SpecError(Problem(what, Origin("overrides"), "pass the path of the plan file"))
    if isinstance(plan, Plan):
        if source.names_model:
            what = "this Plan already has its model"
            raise SpecError(Problem(what, Origin("model"), "leave model and config out"))
        return plan, None
    spec = plan if isinstance(plan, Spec) else source.spec
    has_model = is_built(source, spec)
    if has_model and not spec.free_fields:
        graph, _, rehearse = find_model(spec, source)
        assert graph is not None
        if not isinstance(plan, Spec):
            spec, graph, rehearse = spec_in_force(
                source, spec, (graph, rehearse), noted=lambda text: None
            )
        return make_plan(spec, graph, rehearse=rehearse), rehearse
    number = counted_plan(spec) if not has_model and source.config is None else None
    if number is not None:
        return number, None
    if not isinstance(plan, Spec):
        return checking.decide(source), None
    config = source.config
    config_graph = from_config(config, Origin("config")) if config is not None else graph_of(spec)
    if config_graph is None:
        what = "the plan names no function or config of the model, so its modules are unknown"
        raise SpecError(Problem(what, Origin(spec.source, "model"), "pass model or config"))
    return make_plan(spec, config_graph), None


class Explorer:
    """The object that `explore` returns; a notebook shows it as sliders above pictures.

    Attributes:
        plan: The plan that the sliders start from.
        scene: The current settings, with their pictures.
        controls: A slider or menu for each setting, by the names of `Knobs`; empty without
            ipywidgets.
        widget: The whole widget; None without ipywidgets.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        gpu: str | None,
        memory: str | int | None,
        theme: str,
        rehearse: Rehearser | None = None,
    ) -> None:
        self.plan, self._theme = plan, theme
        self._scene_at: Callable[[Knobs], Scene] = lru_cache(_KEPT)(
            lambda knobs: scene_of(
                plan, knobs, theme=theme, gpu=gpu, memory=memory, rehearse=rehearse
            )
        )
        self.scene = self._scene_at(knobs_of(plan))
        self.controls: Mapping[str, Any] = {}
        self.widget: Any = None
        self._make_widgets()

    def set(self, **settings: int | str) -> Scene:
        """Change settings, move the sliders accordingly, and return the new scene.

        Args:
            settings: New values, by the names of the fields of `Knobs`.

        Raises:
            SpecError: A name is no setting, or a value is not valid for it.
        """
        now = asdict(self.scene.knobs)
        for name, value in settings.items():
            if name not in now:
                fix = f"the settings are {', '.join(now)}"
                raise SpecError(Problem(f"there is no setting '{name}'", Origin("set"), fix))
            if name == "strategy" and value not in STRATEGIES:
                fix = f"write one of {', '.join(STRATEGIES)}"
                raise SpecError(Problem(f"'{value}' is not a strategy", Origin("set"), fix))
            if name != "strategy" and (type(value) is not int or value < 1):
                what = f"'{value}' is not a valid value of {name}"
                raise SpecError(Problem(what, Origin("set"), "pass a whole number of at least 1"))
        self._show(Knobs(**{**now, **settings}))
        return self.scene

    def _make_widgets(self) -> None:
        try:
            import ipywidgets
        except ImportError:
            return
        now = self.scene.knobs

        def slider(name: str, most: int, value: int) -> Any:
            return ipywidgets.IntSlider(
                value, 1, most, description=name, style={"description_width": "initial"}
            )

        def choice(name: str, options: Sequence[Any], value: Any) -> Any:
            return ipywidgets.Dropdown(
                options=options, value=value, description=name,
                style={"description_width": "initial"}, layout={"width": "max-content"},
            )  # fmt: skip

        self.controls = {
            "nodes": slider("nodes", max(32, 2 * now.nodes), now.nodes),
            "gpus_per_node": slider("GPUs per node", max(16, now.gpus_per_node), now.gpus_per_node),
            "micro": slider("micro batch", max(16, 2 * now.micro), now.micro),
            "strategy": choice("strategy", list(STRATEGIES), now.strategy),
            "tp": choice("tp", _sizes(now.tp), now.tp),
            "pp": choice("pp", _sizes(now.pp), now.pp),
        }
        self._shown = ipywidgets.HTML(self.scene.html())
        for control in self.controls.values():
            control.observe(self._turned, "value")
        row = ipywidgets.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap"})
        self.widget = ipywidgets.VBox([row, self._shown])

    def _turned(self, change: Any) -> None:
        self._show(Knobs(**{name: control.value for name, control in self.controls.items()}))

    def _show(self, knobs: Knobs) -> None:
        if knobs == self.scene.knobs:
            return
        is_collected = gc.isenabled()
        gc.disable()  # One collection scans matplotlib's objects: as slow as drawing a picture.
        try:
            self.scene = self._scene_at(knobs)
            if self.widget is not None:
                self._shown.value = self.scene.html()
        finally:
            if is_collected:
                gc.enable()
        if self.widget is None:
            return
        for name, control in self.controls.items():
            value = getattr(knobs, name)
            if hasattr(control, "max"):
                control.max = max(control.max, value)
            elif value not in control.options:
                control.options = sorted([*control.options, value])
            control.unobserve(self._turned, "value")  # Otherwise each assignment would redraw.
            control.value = value
            control.observe(self._turned, "value")

    def __repr__(self) -> str:
        return f"<Explorer of {self.plan.graph.name}: {self.scene.verdict}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Return the sliders, for a running notebook, and a png, for viewers that run no code."""
        note = _WIDGETS if self.widget is None else _STILL
        still = base64.b64encode(png_of(self.scene, [note], theme=self._theme)).decode()
        shown: dict[str, Any] = {"text/plain": repr(self), "image/png": still}
        if self.widget is not None:
            # ipywidgets defines the MIME type of a widget; include and exclude are not used.
            shown = {**self.widget._repr_mimebundle_(), **shown}
        return shown


def _sizes(now: int) -> list[int]:
    return sorted({1, 2, 4, 8, now})
