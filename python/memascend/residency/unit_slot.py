"""Tracks one unit at run time: its parameters, where its bytes are, and the tensors on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.multiprocessing.reductions import StorageWeakRef

    from memascend.residency.placeholder import Place

# Holds what is bound for all threads; no thread has this number.
NOBODY = 0


class UnitRead(Protocol):
    """A read of a unit that was begun."""

    def wait(self) -> int:
        """Wait for it, and check it."""

    def done(self) -> bool:
        """Whether the device is done."""


class Home:
    """One unit at run time: its parameters, and where its bytes are now."""

    __slots__ = (
        "base",
        "bound",
        "epoch",
        "fetch",
        "guarded",
        "held",
        "held_at",
        "holders",
        "in_place",
        "index",
        "mapped",
        "name",
        "nbytes",
        "pending",
        "pinned",
        "places",
        "slot_bytes",
        "trained",
        "used",
        "version",
        "views",
        "weak",
    )

    def __init__(
        self,
        index: int,
        name: str,
        nbytes: int,
        slot_bytes: int,
        *,
        pinned: bool,
        held: bool = False,
    ) -> None:
        self.index = index
        self.name = name
        self.nbytes = nbytes
        self.slot_bytes = slot_bytes
        self.pinned = pinned
        # Its values are in memory for the whole run: it has no place in the arena.
        self.held = held
        # `base` is where they are held, at this address, and was fresh at this epoch of the store.
        self.in_place = False
        self.held_at = 0
        self.epoch = -1
        # Of the file that it was brought into, where the model computes with values that are not stored.
        self.mapped: StorageWeakRef | None = None
        self.places: list[Place] = []
        self.bound = 0
        # Its parameters ask each thread whether it has bound them.
        self.guarded = False
        # The threads that have bound it, with how often; `bound` is the sum.
        self.holders: dict[int, int] = {}
        self.version = 0
        # A step has changed its values, so the next one will.
        self.trained = False
        self.used = 0
        self.base: torch.Tensor | None = None
        self.fetch: UnitRead | None = None
        # The bytes that `fetch` fills.
        self.pending: torch.Tensor | None = None
        self.views: list[torch.Tensor] | None = None
        # Of the storage that was leased last: views that others hold may keep it alive.
        self.weak: tuple[StorageWeakRef, int] | None = None

    def count(self, holder: int, more: int) -> None:
        """Count how often a thread has bound it. An interrupt in here leaves a holder that is found."""
        counted = self.holders.get(holder, 0) + more
        if counted > 0:
            self.holders[holder] = counted
        else:
            self.holders.pop(holder, None)
        self.bound = sum(self.holders.values())

    def overlay(self, base: torch.Tensor, overrides: Mapping[str, torch.Tensor]) -> None:
        """Let the bytes that it gets have values that are not on storage, by the names of their parameters."""
        if overrides:
            with torch.inference_mode(mode=False), torch.no_grad():
                for place in self.places:
                    values = overrides.get(place.name)
                    if values is not None:
                        view(base, place).copy_(values)

    def count_write(self) -> None:
        """Its values were updated where they lie, as by an optimizer in place: a graph that saved a view is refused."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for place in self.places:
                torch.autograd.graph.increment_version(place.parameter)
                if place.bound_version is not None:
                    place.note_version()


def view(base: torch.Tensor, place: Place) -> torch.Tensor:
    """A parameter's values in the bytes of its unit."""
    with torch.inference_mode(mode=False), torch.no_grad():
        values = torch.empty(0, dtype=place.dtype, device=base.device)
        return values.set_(base.untyped_storage(), place.offset // values.element_size(), place.shape, place.stride)


def alive(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference, if it lives."""
    if weak.expired():
        return None
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)  # noqa: SLF001
