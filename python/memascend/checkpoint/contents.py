"""Reads a store as a checkpoint has it: values, and state by torch's names, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend.checkpoint.state_forms import plain_parts, plain_tensors
from memascend.engine import master_of
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from memascend.engine import Part, Store

    # Takes elements of an entry's values ("") or of a state tensor, from an element on, in their order.
    Put = Callable[[str, str, int, torch.Tensor], object]

# The count of updates, which stands among the state of a parameter that is trained.
UPDATES = "updates"


@dataclass(frozen=True)
class Content:
    """What a checkpoint has of one entry."""

    name: str
    values: torch.Tensor  # on meta
    state: dict[str, torch.Tensor]  # on meta, by name
    # Its dimensions from the largest stride to the smallest, where blocks of its state are not row by row.
    order: list[int] | None = None


class Contents(Protocol):
    """What a checkpoint is written from."""

    # In the order of the store's entries.
    entries: list[Content]
    # Whether moments are in a format of their own.
    has_formats: bool

    def read(self, put: Put) -> None:
        """Hand out all of it; the parts of a tensor come in their order."""


class RankContents(Contents, Protocol):
    """What one of several ranks has of it."""

    def read_entries(self, names: list[str], put: Put) -> None:
        """Hand out some entries that are row-major, or a single one."""


class StoreContents:
    """What the last commit of a store left."""

    def __init__(self, store: Store, trained: Collection[str]) -> None:
        """`trained` are the names of the parameters that the optimizer updates.

        Raises:
            ConfigError: the optimizer's state has a name that is taken.
        """
        self._store = store
        self._stored = store.entries()
        self._by_name = {entry["name"]: entry for entry in self._stored}
        self._trained = trained
        self.has_formats = any(_in_fewer_bits(entry) for entry in self._stored)
        self.entries = [self._content(entry) for entry in self._stored]

    def _content(self, entry: Mapping[str, Any]) -> Content:
        name = entry["name"]
        stored = {of: _meta(dtype, shape) for of, dtype, shape in entry["state"]}
        # A compact entry's rest is written as the master that it belongs to.
        state = plain_tensors(stored)
        if name in self._trained:
            if UPDATES in state:
                raise ConfigError(f"the optimizer keeps state called 'updates' for {name!r}, which cannot be saved")
            state[UPDATES] = _meta("int64", [])
        # Blocks are counted as the elements lie, which is not told by row-major tensors.
        in_blocks = entry["order"] is not None and any(of.endswith("_absmax") for of in stored)
        return Content(name, _meta(entry["dtype"], entry["shape"]), state, list(entry["order"]) if in_blocks else None)

    def read(self, put: Put) -> None:
        """Walk over all of it."""
        for names in self._runs():
            self.read_entries(names, put)

    def _runs(self) -> Iterator[list[str]]:
        """Entries that are walked over together; one that is not row-major comes alone."""
        run: list[str] = []
        for entry in self._stored:
            if entry["order"] is None:
                run.append(entry["name"])
                continue
            if run:
                yield run
            yield [entry["name"]]
            run = []
        if run:
            yield run

    def read_entries(self, names: list[str], put: Put) -> None:
        """Walk over some entries that are row-major, or over a single one."""

        def visit(name: str, parts: list[Part]) -> None:
            found = {part.of: part for part in parts}
            if _is_composed(self._by_name[name]):
                values = found.pop("")
                tensors = {of: part.values for of, part in found.items()}
                put(name, "", values.start, values.values)
                for of, tensor in _plain(self._by_name[name], values.values, tensors).items():
                    put(name, of, found[of].start if of in found else values.start, tensor)
                return
            for of, part in found.items():
                put(name, of, part.start, part.values)

        first = self._by_name[names[0]]
        if first["order"] is None:
            self._store.scan(names, visit)
        else:
            values, state = self._store.read(names[0])
            put(names[0], "", 0, values.contiguous())
            for of, tensor in (_plain(first, values, state) if _is_composed(first) else state).items():
                put(names[0], of, 0, tensor.contiguous())
        for name in names:
            if name in self._trained:
                put(name, UPDATES, 0, torch.tensor(self._by_name[name]["step"]))


class WeightContents:
    """The values alone of what a store has."""

    has_formats = False

    def __init__(self, whole: StoreContents) -> None:
        self._whole = whole
        self.entries = [Content(entry.name, entry.values, {}) for entry in whole.entries]

    def read(self, put: Put) -> None:
        """Walk over all of it."""
        self._whole.read(_without_state(put))

    def read_entries(self, names: list[str], put: Put) -> None:
        """Walk over some entries that are row-major, or over a single one."""
        self._whole.read_entries(names, _without_state(put))


def _without_state(put: Put) -> Put:
    def put_values(name: str, of: str, start: int, values: torch.Tensor) -> None:
        if not of:
            put(name, of, start, values)

    return put_values


def _plain(
    entry: Mapping[str, Any], values: torch.Tensor, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The state of a compact entry, or of a part of it, as a checkpoint has it."""
    if _in_fewer_bits(entry):
        return plain_parts(values, state, entry["format"])
    return master_of(values, state)


def _is_composed(entry: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has other tensors of it than the store."""
    return entry["compact"] or _in_fewer_bits(entry)


def _in_fewer_bits(entry: Mapping[str, Any]) -> bool:
    """Whether its moments are in a format of their own."""
    return str(entry["format"] or "").endswith(("bf16", "8bit"))


def _meta(dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
