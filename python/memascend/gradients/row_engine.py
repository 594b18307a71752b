"""Updates embeddings by rows: makes each chunk of a gradient when the engine reaches it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.engine.ffi import Lent
from memascend.engine.lent_gradients import LendingEngine
from memascend.residency.row_gradient import RowGradient

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from memascend.engine import Engine


class RowEngine(LendingEngine):
    """An engine that is lent gradients by rows.

    A gradient by rows stands on the gradients of look-ups' results, which are torch's; so a call that hands one over
    returns when it was used, while they are there anyway. An embedding's gradient comes last in a backward.
    """

    def __init__(self, engine: Engine, names: Collection[str], queue_bytes: int) -> None:
        """`names` are the parameters by rows; `queue_bytes` is what gradients have that wait, and not for these."""
        super().__init__(engine)
        self._names = frozenset(names)
        self._queue_bytes = queue_bytes

    def lend(self, name: str, gradient: torch.Tensor) -> torch.Tensor | Lent:
        """See `LendingEngine`."""
        if isinstance(gradient, RowGradient):
            return Lent(gradient, _Windows(gradient), _nothing, 0)
        if name in self._names and gradient.nbytes > self._queue_bytes and gradient.data_ptr() % 8 == 0:
            # Somebody used the weight in another way: all of the gradient is there, and the plan has no room for it.
            return Lent(gradient, _WholeGradient(gradient), _nothing, 0)
        return gradient

    def settle(self, given: torch.Tensor | Lent | None) -> None:
        """See `LendingEngine`."""
        if isinstance(given, Lent):
            self.drain()


class _Windows:
    """Lends a gradient by rows; the last window stays until the next one."""

    def __init__(self, gradient: RowGradient) -> None:
        self._gradient = gradient
        self._row_bytes = gradient.shape[1] * gradient.element_size()
        self._window: torch.Tensor | None = None

    def __call__(self, start: int, nbytes: int) -> tuple[int, int, int]:
        # The one before goes first.
        self._window = None
        first, end = start // self._row_bytes, -(-(start + nbytes) // self._row_bytes)
        window = self._window = self._gradient.window(first, end)
        return window.data_ptr(), first * self._row_bytes, window.nbytes


class _WholeGradient:
    """Lends a gradient that is all there."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient

    def __call__(self, start: int, nbytes: int) -> tuple[int, int, int]:
        del start, nbytes
        return self._gradient.data_ptr(), 0, self._gradient.nbytes


def _nothing() -> None:
    """What is in host memory needs no order."""
