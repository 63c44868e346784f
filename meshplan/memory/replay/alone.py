"""Parameters without a wrapper, whose gradients are used as autograd computes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from meshplan.memory.log.events import Term
from meshplan.memory.replay.optimizer import Updated
from meshplan.memory.replay.writer import LogWriter


class UnwrappedParameters:
    """The parameters that neither an FSDP unit nor DDP manages, and their gradients.

    Args:
        writer: The log to write to.
        params: The trainable parameters among them.
        fills: If True, allocate zeros for missing gradients, because another rank may have these
            gradients.

    Attributes:
        gradients: Storages of the gradients, by fqn of the parameter.
    """

    def __init__(self, writer: LogWriter, params: Iterable[Updated], *, fills: bool) -> None:
        self._writer, self._fills = writer, fills
        self._params = {param.fqn: param for param in params}
        self.gradients: dict[str, int] = {}

    def allocate_resident(self) -> None:
        """Allocate nothing: these parameters need no buffers before a step."""

    def before_forward(self, *, is_first: bool, is_last: bool) -> None:
        """Do nothing, because no wrapper acts before forward."""

    def has_gradient(self, param: str, storage: int) -> None:
        """Keep a gradient from autograd, or free it if it is added to an earlier gradient."""
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
        """Fqns of the parameters that have a gradient."""
        return self.gradients.keys()

    def drop_gradients(self) -> None:
        """Play `zero_grad(set_to_none=True)`."""
        self._writer.free_all(self.gradients.values())
        self.gradients.clear()
