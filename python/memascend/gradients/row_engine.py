"""Updates embeddings by rows: makes each chunk of a gradient when the engine reaches it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.engine.ffi import Lent
from memascend.residency.row_gradient import RowGradient

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from memascend.engine import Engine
    from memascend.engine.chunk import Chunk

__all__ = ["RowEngine"]


class RowEngine:
    """An engine: what is asked of it here is what gradients and updates ask.

    A gradient by rows stands on the gradients of look-ups' results, which are torch's; so a call that hands one over
    returns when it was used, while they are there anyway. An embedding's gradient comes last in a backward.
    """

    def __init__(self, engine: Engine, names: Collection[str], queue_bytes: int) -> None:
        """`names` are the parameters by rows; `queue_bytes` is what gradients have that wait, and not for these."""
        self._engine = engine
        self._names = frozenset(names)
        self._queue_bytes = queue_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def update(self, name: str, gradient: torch.Tensor, **options: Any) -> None:
        """See `Engine.update`."""
        lent = self._lent(name, gradient)
        self._engine.update(name, lent, **options)
        self._let_use(lent)

    def spill(self, name: str, gradient: torch.Tensor, *, add: bool = False) -> None:
        """See `Engine.spill`."""
        lent = self._lent(name, gradient)
        self._engine.spill(name, lent, add=add)
        self._let_use(lent)

    def apply(
        self,
        name: str,
        function: Callable[[Chunk], object],
        *,
        step: int,
        gradient: torch.Tensor | None = None,
        whole: bool = False,
    ) -> None:
        """See `Engine.apply`."""
        lent = None if gradient is None else self._lent(name, gradient)
        self._engine.apply(name, function, step=step, gradient=lent, whole=whole)
        self._let_use(lent)

    def _lent(self, name: str, gradient: torch.Tensor) -> torch.Tensor | Lent:
        if isinstance(gradient, RowGradient):
            return Lent(gradient, _Windows(gradient), _nothing, 0)
        if name in self._names and gradient.nbytes > self._queue_bytes and gradient.data_ptr() % 8 == 0:
            # Somebody used the weight in another way: all of the gradient is there, and the plan has no room for it.
            return Lent(gradient, _InMemory(gradient), _nothing, 0)
        return gradient

    def _let_use(self, lent: torch.Tensor | Lent | None) -> None:
        if isinstance(lent, Lent):
            self._engine.finish()


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


class _InMemory:
    """Lends a gradient that is all there."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient

    def __call__(self, start: int, nbytes: int) -> tuple[int, int, int]:
        del start, nbytes
        return self._gradient.data_ptr(), 0, self._gradient.nbytes


def _nothing() -> None:
    """What is in host memory needs no order."""
