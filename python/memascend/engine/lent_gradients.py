"""Lends an engine gradients that lie where it cannot read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from memascend.engine.chunk import Chunk
    from memascend.engine.engine import Adam, Engine, Late
    from memascend.engine.ffi import Lent


class LendingEngine(ABC):
    """An engine whose gradients pass through `lend`; all else is the engine's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @abstractmethod
    def lend(self, name: str, gradient: torch.Tensor) -> torch.Tensor | Lent:
        """What the engine is given for a gradient: itself where the engine can read it."""

    def settle(self, given: torch.Tensor | Lent | None) -> None:
        """The engine was given this, and the call that handed it over is about to return."""
        del given

    def update(self, name: str, gradient: torch.Tensor, numbers: Adam, *, values: torch.Tensor | None = None) -> None:
        """See `Engine.update`."""
        given = self.lend(name, gradient)
        self._engine.update(name, given, numbers, values=values)
        self.settle(given)

    def spill(self, name: str, gradient: torch.Tensor, *, add: bool = False) -> None:
        """See `Engine.spill`."""
        given = self.lend(name, gradient)
        self._engine.spill(name, given, add=add)
        self.settle(given)

    def apply(
        self,
        name: str,
        function: Callable[[Chunk], object],
        *,
        step: int,
        gradient: torch.Tensor | None = None,
        whole: bool = False,
        late: Late = "never",
    ) -> None:
        """See `Engine.apply`."""
        given = None if gradient is None else self.lend(name, gradient)
        self._engine.apply(name, function, step=step, gradient=given, whole=whole, late=late)
        self.settle(given)
