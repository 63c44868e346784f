"""Parameters that no unit manages: autograd leaves their gradients where they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from meshplan.memory.log.events import Term
from meshplan.memory.replay.optimizer import Updated
from meshplan.memory.replay.writer import LogWriter


class UnwrappedParameters:
    """They are as they are stored, and so are their gradients.

    Args:
        fills: Whether a missing gradient is made zeros, since another rank may have it.

    Attributes:
        gradients: Their storages, by parameter.
    """

    def __init__(self, writer: LogWriter, params: Iterable[Updated], *, fills: bool) -> None:
        self._writer, self._fills = writer, fills
        self._params = {param.fqn: param for param in params}
        self.gradients: dict[str, int] = {}

    def be_there(self) -> None:
        """There is nothing before a step."""

    def before_forward(self, *, is_first: bool, is_last: bool) -> None:
        """Nothing is done."""

    def has_gradient(self, param: str, storage: int) -> None:
        """Autograd adds a gradient to the one that is there."""
        if param in self.gradients:
            self._writer.free(storage)
        else:
            self.gradients[param] = storage

    def fill(self) -> None:
        """Before they are averaged."""
        for fqn, param in self._params.items() if self._fills else ():
            if fqn not in self.gradients:
                self.gradients[fqn] = self._writer.make(param.num_bytes, Term.GRADIENTS)

    @property
    def found(self) -> Collection[str]:
        """Parameters that have a gradient."""
        return self.gradients.keys()

    def drop_gradients(self) -> None:
        """`zero_grad(set_to_none=True)`."""
        self._writer.free_all(self.gradients.values())
        self.gradients.clear()
