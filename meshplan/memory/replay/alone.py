"""Parameters that no unit manages: autograd leaves their gradients where it computes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from meshplan.memory.log.events import Term
from meshplan.memory.replay.optimizer import Updated
from meshplan.memory.replay.writer import LogWriter


class UnwrappedParameters:
    """Parameters without a wrapper: they and their gradients are used as they are stored.

    Args:
        writer: The log to write to.
        params: The trainable ones of these parameters.
        fills: If True, zeros replace missing gradients, because another rank may have them.

    Attributes:
        gradients: Storages of the gradients, by parameter.
    """

    def __init__(self, writer: LogWriter, params: Iterable[Updated], *, fills: bool) -> None:
        self._writer, self._fills = writer, fills
        self._params = {param.fqn: param for param in params}
        self.gradients: dict[str, int] = {}

    def allocate_resident(self) -> None:
        """Allocate nothing, because nothing exists before a step."""

    def before_forward(self, *, is_first: bool, is_last: bool) -> None:
        """Do nothing before forward."""

    def has_gradient(self, param: str, storage: int) -> None:
        """Take over a gradient from autograd, or free it if it is added to an earlier one."""
        if param in self.gradients:
            self._writer.free(storage)
        else:
            self.gradients[param] = storage

    def fill(self) -> None:
        """Allocate zeros for missing gradients, before gradients are averaged."""
        for fqn, param in self._params.items() if self._fills else ():
            if fqn not in self.gradients:
                self.gradients[fqn] = self._writer.make(param.num_bytes, Term.GRADIENTS)

    @property
    def found(self) -> Collection[str]:
        """Parameters that have a gradient."""
        return self.gradients.keys()

    def drop_gradients(self) -> None:
        """Play `zero_grad(set_to_none=True)`."""
        self._writer.free_all(self.gradients.values())
        self.gradients.clear()
