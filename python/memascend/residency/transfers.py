"""Holds state dicts in transfer: copies for one that is being made, values of one that is being loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from memascend.residency.placeholder import Place


class Transfers:
    """What detach() and copy_() of a parameter do while torch makes or loads a state dict."""

    def __init__(self) -> None:
        """Begin with none."""
        # Of the state dict that is being made, by name: parameters that are tied are one tensor in it.
        self._copies: dict[str, torch.Tensor] | None = None
        self._write: Callable[[Place, torch.Tensor], None] | None = None
        # Commits what was loaded and is held back.
        self._settle: Callable[[], None] | None = None

    def settle(self) -> None:
        """Somebody is about to use values: those that were loaded and are held back are committed now."""
        if self._settle is not None:
            self._settle()

    def detached(self, place: Place, copy: Callable[[Place], torch.Tensor]) -> torch.Tensor | None:
        """What `copy` makes of a parameter where a state dict is being made; see `Residency`."""
        if self._copies is None:
            return None
        if place.name not in self._copies:
            self._copies[place.name] = copy(place)
        return self._copies[place.name].detach()

    def assigned(self, place: Place, values: torch.Tensor) -> bool:
        """Write values through to storage where a state dict is being loaded; see `Residency`."""
        if self._write is None:
            return False
        self._write(place, values)
        return True

    def begin_making(self) -> None:
        """From here on a parameter that is detached is copied."""
        self._copies = {}

    def end_making(self) -> None:
        """The state dict is made, or was given up."""
        self._copies = None

    def begin_loading(self, write: Callable[[Place, torch.Tensor], None]) -> None:
        """From here on `write` gets what is copied to a parameter."""
        self._write = write
        self._settle = None

    def end_loading(self, settle: Callable[[], None] | None) -> None:
        """The state dict is loaded, or was given up; `settle` commits what is held back of it, where there is any."""
        self._write = None
        self._settle = settle
