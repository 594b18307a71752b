"""Holds the gradient of one parameter from its arrival until it is dropped."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend.gradients.handle import GradientHandle

if TYPE_CHECKING:
    import weakref

    from memascend.gradients.handle import Notice
    from memascend.residency.placeholder import Place

__all__ = ["Arrival", "Keeper", "Spill"]

_WORDS: dict[Notice, str] = {
    "add": "accumulation",
    "change": "a change of gradients, as by clipping",
    "norm": "a norm of gradients",
    "read": "a read of gradients",
    "scaler": "a GradScaler",
    "zero": "zero_grad(set_to_none=False)",
}


class Keeper(Protocol):
    """Who has charge of all gradients: the part of `Gradients` that one of them asks."""

    spill: Spill
    # Something arrived since the last step.
    fresh: bool

    def added(self, kept: Arrival, gradient: torch.Tensor) -> None:
        """A gradient came where there is one."""

    def noticed(self, what: str) -> None:
        """The loop does something that needs kept gradients."""


class Spill(Protocol):
    """Where gradients wait: the part of the engine that is used here."""

    def spill(self, name: str, gradient: torch.Tensor, *, add: bool = False) -> None:
        """Write a gradient, or add it to the one that is there."""

    def spilled(self, name: str) -> tuple[bool, float]:
        """Whether it has a value that is not finite, and its squared norm."""

    def read_spilled(self, name: str, into: torch.Tensor) -> None:
        """Read it."""

    def drop_spilled(self, name: str) -> None:
        """Forget it."""

    def finish(self) -> None:
        """Wait for all that is queued."""

    def discard(self, name: str | None = None) -> None:
        """Forget what is staged."""


class Arrival:
    """The gradient of one parameter, from its arrival until it is dropped. What a handle stands on."""

    __slots__ = (
        "__weakref__",
        "_owner",
        "arrived_in",
        "found",
        "group",
        "handle",
        "in_pieces",
        "name",
        "options",
        "place",
        "seen",
        "spilled",
        "staged",
        "step",
        "used",
    )

    def __init__(self, owner: Keeper, place: Place, group: int, step: int) -> None:
        self._owner = owner
        self.place = place
        self.name = place.name
        self.group = group
        # Updates that are committed.
        self.step = step
        self.handle: GradientHandle | None = None
        # An update is staged and not committed.
        self.staged = False
        # A committed step has used it, and no gradient came since.
        self.used = False
        self.spilled = False
        self.options: Any = None
        # What the check of a used gradient found, where the gradient was: read when it is asked for, as that may
        # have to wait for a device.
        self.found: tuple[torch.Tensor, torch.Tensor] | tuple[bool, float] | None = None
        self.arrived_in = -1
        # The gradient in memory that a step has used (which may be gone, and another be where it was), and its version.
        self.seen: tuple[weakref.ref[torch.Tensor], int] | None = None
        # It comes in several pieces in one backward (nested graph tasks), so it is never updated as it appears.
        self.in_pieces = False

    @property
    def finite(self) -> bool:
        """Whether every value of the used gradient was finite."""
        return self.found is None or not bool(self.found[0])

    @property
    def squared(self) -> float:
        """The squared norm of the used gradient."""
        return 0.0 if self.found is None else float(self.found[1])

    # --- what handles ask ---------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """The parameter's."""
        return torch.Size(self.place.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The gradient's."""
        return self.place.dtype

    @property
    def fused(self) -> bool:
        """Whether an update used it already: it is gone, or a change would come too late."""
        return self.staged or not self.spilled

    def read(self) -> torch.Tensor:
        """A copy of it, in host memory."""
        into = torch.empty_strided(self.place.shape, self.place.stride, dtype=self.dtype, device="cpu")
        self._owner.spill.read_spilled(self.name, into)
        return into

    def add(self, gradient: torch.Tensor) -> None:
        """More of it came."""
        self._owner.added(self, gradient)

    def assign(self, gradient: torch.Tensor) -> None:
        """It is another one now."""
        self._owner.spill.spill(self.name, gradient)
        self._owner.fresh = True

    def norm(self) -> float:
        """Its 2-norm, in double precision."""
        return math.sqrt(self._owner.spill.spilled(self.name)[1] if self.spilled else self.squared)

    def nonfinite(self) -> bool:
        """Whether it has a value that is not finite."""
        if self.spilled:
            return self._owner.spill.spilled(self.name)[0]
        return not self.finite

    def noticed(self, what: Notice) -> None:
        """Somebody looked at it, or changed it. A second piece of it is told from accumulation in `added`."""
        if what != "add":
            self._owner.noticed(_WORDS[what])

    def is_seen(self, gradient: torch.Tensor) -> bool:
        """Whether a step has used this gradient in memory, which nobody wrote to since."""
        return self.seen is not None and self.seen[0]() is gradient and self.seen[1] == gradient._version  # noqa: SLF001

    def stands_in(self, gradient: torch.Tensor | None) -> bool:
        """Whether p.grad is the handle, or another tensor of the same gradient, which then is the handle."""
        if gradient is self.handle:
            return True
        if (
            self.handle is None
            or not isinstance(gradient, GradientHandle)
            or gradient.gradient is not self.handle.gradient
        ):
            return False
        self.handle = gradient
        return True

    def laid_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient laid out as the parameter is stored."""
        if isinstance(gradient, GradientHandle):
            gradient = gradient.materialize()
        gradient = gradient.detach()
        if gradient.is_sparse:
            return gradient
        if tuple(gradient.stride()) != self.place.stride and gradient.numel() > 1:
            gradient = torch.empty_strided(
                self.place.shape, self.place.stride, dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
        return gradient
