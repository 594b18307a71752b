"""Knows which runs of an optimizer's own code are tried on a copy first, where memory has the only state there is.

A run that raises half-way through state in memory would cost everything since the store was opened. A class of torch's
own does the same whatever its numbers are, so it is tried whenever an option is of another kind than it was in a run
that came to its end: switched on or off, or of another type. Of any other class nothing is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memascend.optimizers.support import known

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from memascend.engine import Chunk, Late


class Rehearsals:
    """The kinds of runs of one optimizer that have come to their end."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._known = known(optimizer)
        self._ended: set[Hashable] = set()

    def followed(
        self, function: Callable[[Chunk], None], group: Mapping[str, Any], *traits: Hashable
    ) -> tuple[Callable[[Chunk], None], Late]:
        """A run that is heard of when it ends, and when it may be called.

        Args:
            function: the run.
            group: the options that it uses.
            traits: what else decides what it does.
        """
        if not self._known:
            return function, "rehearsed"
        kind = (traits, tuple((name, _kind(value)) for name, value in group.items() if name != "params"))

        def heard(chunk: Chunk) -> None:
            function(chunk)
            if chunk.last:
                self._ended.add(kind)

        return heard, "always" if kind in self._ended else "rehearsed"


def _kind(value: Any) -> object:
    """What of an option decides which code runs."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.device
    if isinstance(value, list | tuple):
        return type(value), *map(_kind, value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value), bool(value)
    if value is None or isinstance(value, bool | str):
        return value
    return type(value)
