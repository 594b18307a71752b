"""Hands out copies of weights, and refuses what is written to them: a weight has one truth, the last commit.

Where the bytes of a weight can be. No row but the first is ever read back, except for the door's at its end.

| where | whose memory | who may write | what ends it |
|---|---|---|---|
| `Bytes.OFFLOADED` | the store's slots, on storage | the engine, into the slot that is not valid | its commit |
| `Bytes.READING` | a lease of the arena | the read | its end, verified (`CACHED`), or an error (`OFFLOADED`) |
| `Bytes.CACHED` | a lease of the arena | nobody: torch's counter tells, `step()` refuses | eviction, a commit |
| `Bytes.IN_PLACE` | the store's RAM tier | the engine at a commit; nobody else, as above | `close()` |
| `HandedOut`, a view (`.data`, `detach()`) | a file | nobody: its checksum tells | user code, before a commit |
| `HandedOut`, a snapshot (`state_dict()`) | a file | nobody, as above | user code |
| a door: `materialized()`, `edit()` | a file | user code | its end, which commits what was changed |
| a deep copy of the model | a file | user code: it is another model's | user code |

A copy that is taken inside of a forward or a backward is a snapshot, too.

Here are the files, and what was handed out. What is in units is in `unit` and `cached_units`; the doors are in
`session.value_edits` and `session.materialize`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from memascend.errors import ConfigError, StorageError, UsageError
from memascend.memory import file_memory
from memascend.params.aliases import attributes, storage_of, uses, uses_of_one
from memascend.params.unit import alive, view_of
from memascend.storage import checksum_of
from memascend.tensors import bytes_of, memory_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from memascend.params.offloaded_param import Place
    from memascend.params.residency import Residency
    from memascend.params.unit import Home

# --- where copies lie --------------------------------------------------------------------

_WRITE_BYTES = 8 << 20


def filed_copy(place: Place, values: torch.Tensor, folder: Path | None) -> torch.Tensor:
    """A copy of values of a parameter, laid out as it is, in a file that nothing else sees and that ends with it.

    `folder` is where the file lies; None where none was named and the storage is no folder.
    """
    if folder is None:
        raise ConfigError("the storage is a raw device: give offload(scratch=) a folder for copies of the weights")
    nbytes = place.nothing.nbytes
    if nbytes == 0:
        return torch.empty(place.shape, dtype=place.dtype, device="cpu")
    values = part = on_host = bytes_of(values)
    try:
        with tempfile.TemporaryFile(prefix=".memascend-copy-", dir=folder) as file:
            for part in values.split(_WRITE_BYTES):
                on_host = part.cpu()
                file.write(memory_of(on_host))
            file.flush()
            if nbytes > _WRITE_BYTES:
                # The page cache goes behind it.
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return file_memory(file.fileno(), nbytes).view(place.dtype).as_strided(place.shape, place.stride)
    except OSError as error:
        raise StorageError(
            f"{folder}: no disk space for a copy of the weights: {error.strerror}; give offload(scratch=) another "
            "folder",
            errno=error.errno,
            path=str(folder),
        ) from error
    finally:
        # The traceback of an error would hold them, and with them their unit's place in memory.
        del values, part, on_host


# --- what was handed out -----------------------------------------------------------------

DOORS = (
    "write to weights within optimizer.edit(parameter) or memascend.materialized(model, modify=True), or by "
    "model.load_state_dict()"
)
# Where a forward writes to its own weights, which a door does not allow.
BEFORE_FORWARD = (
    "if a forward does it, as nn.Embedding(max_norm=) and normalised weights do: let the loop do it before the "
    "forward, within optimizer.edit(), as docs/limits.md shows"
)
# What gets a copy: user code, which may hold it until the next commit; the same inside of a forward or a backward, or a
# state dict, which both keep the values of their moment.
For = Literal["view", "inside", "state dict"]
# So many copies are looked at whenever another one is handed out; all of them where they have doubled.
_FEW = 16
# How often, and after which pause, a view is looked for again that another thread may have.
_LOOKS, _PAUSE_SECONDS = 20, 0.005


class HandedOut:
    """A copy of a weight that user code may have.

    Attributes:
        seen: the checksum of its values when it was handed out.
    """

    __slots__ = ("_alike", "is_snapshot", "place", "seen", "values")

    def __init__(self, place: Place, values: torch.Tensor, *, is_snapshot: bool, alike: int = 1) -> None:
        """`is_snapshot`: it may outlive a commit that changes the weight; `alike`: so many of these have its memory."""
        self._alike = alike
        self.place = place
        self.is_snapshot = is_snapshot
        self.seen = checksum(values, place)
        # No view of another tensor, which would count as an owner of the memory.
        self.values = view_of(
            values.untyped_storage(), values.dtype, int(values.storage_offset()), values.shape, values.stride()
        )

    @property
    def is_held(self) -> bool:
        """Whether other code has the memory, too."""
        return uses(self.values) > uses_of_one() + self._alike - 1

    def compare(self) -> bool:
        """Whether its values are others now, which is said once."""
        before, self.seen = self.seen, checksum(self.values, self.place)
        return before != self.seen


class _Stale(NamedTuple):
    """Memory with values from before a commit, which other code has."""

    home: Home
    place: Place | None  # None: it has the values of all parameters of the unit
    memory: StorageWeakRef
    last_used: int  # the unit's last use before the commit

    def name_of(self, view: torch.Tensor) -> str:
        """The name of the parameter whose values a view of this memory begins with."""
        if self.place is not None:
            return self.place.name
        begin = int(view.storage_offset()) * view.element_size()
        return max((place.offset, place.name) for place in self.home.places if place.offset <= begin)[1]


class WeightCopies:
    """The copies of one model's weights that were handed out, each until it was compared and nobody has it."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        # Copies of present values, which are handed out again; and others that somebody still has.
        self._now: dict[tuple[str, For], HandedOut] = {}
        self._older: list[HandedOut] = []
        # Memory of a forward that was still held when a commit changed its weights.
        self._stale: list[_Stale] = []
        # How many are there when all of them are looked at, and not the last few alone.
        self._many = _FEW

    @property
    def computes(self) -> bool:
        """Whether this thread is inside of a forward or a backward."""
        return bool(torch._C._current_graph_task_id() != -1) or self._residency.frames.inside  # noqa: SLF001

    # --- handing out ----------------------------------------------------------------------

    def of(self, place: Place) -> torch.Tensor:
        """A copy of a weight for user code.

        Raises:
            UsageError: an earlier copy was written to.
        """
        residency = self._residency
        of: For = "state dict" if state_dicts.being_made else "inside" if self.computes else "view"
        with residency.lock, unseen(), torch.inference_mode(mode=False), torch.no_grad():
            residency.units.require_open()
            if len(self._now) < self._many:
                own = {(place.name, of)} & self._now.keys()
                self._look({*own, *islice(reversed(self._now), _FEW)}, but=place)
            else:
                self._look(list(self._now), but=place)
                self._many = max(_FEW, 2 * len(self._now))
            one = self._now.get((place.name, of))
            if one is None:
                values = residency.copy_of(place)
                # State dicts need not fit the device.
                values = values if of == "state dict" else values.to(place.device)
                one = self._now[place.name, of] = HandedOut(place, values, is_snapshot=of != "view")
            return one.values.detach()

    def stand_in(self, place: Place) -> torch.nn.Parameter:
        """A plain parameter on such a copy, for a function that is called on the offloaded one."""
        return place.plain(self.of(place))

    @contextlib.contextmanager
    def materialized(self, places: list[Place]) -> Iterator[None]:
        """Let parameters have such copies inside, for a function whose graph leads to them."""
        residency = self._residency
        values = [self.of(place) for place in places]
        with residency.turns.alone(), contextlib.ExitStack() as undo:
            if any(residency.units.home_of[place.name].holders for place in places):
                raise UsageError(
                    "another thread computes the model, which may evict the weights of a view: take views in that "
                    "thread, or afterwards"
                )
            if residency.hooks.push():
                undo.callback(residency.hooks.pop)
            for place, one in zip(places, values, strict=True):
                undo.callback(place.offload)
                place.materialize(one)
            yield

    def duplicate(self, place: Place) -> torch.nn.Parameter:
        """A plain parameter of another model, with a copy of the values in a file of its own."""
        self._residency.units.require_open()
        with torch.inference_mode(mode=False), torch.no_grad():
            return place.plain(self._residency.copy_of(place).to(place.device))

    def keep(self, kept: Sequence[tuple[Place, torch.Tensor]], *, is_snapshot: bool) -> None:
        """User code keeps memory that parameters had while they were real, which may be parts of one vector."""
        alike = Counter(values.untyped_storage()._cdata for _, values in kept)  # noqa: SLF001
        with self._residency.lock:
            for place, values in kept:
                count = alike[values.untyped_storage()._cdata]  # noqa: SLF001
                self._older.append(HandedOut(place, values, is_snapshot=is_snapshot, alike=count))

    # --- looking --------------------------------------------------------------------------

    def require_unwritten(self, *, loads: bool = False) -> None:
        """Before a step, a save, a change of values or the end: refuse what was written to copies.

        `loads`: a state dict is loaded, which may be one that was changed for that.

        Raises:
            UsageError: once for each write; nothing was changed.
        """
        with self._residency.lock:
            if loads:
                for key in [key for key in self._now if key[1] == "state dict"]:
                    self._older.append(self._now.pop(key))
                for one in self._older:
                    if one.is_snapshot:
                        one.compare()
            self._look(list(self._now), older=True)

    def forward_begins(self) -> None:
        """The same before a forward, for copies of the present values; not where a backward computes a part again."""
        if (self._now or self._stale) and torch._C._current_graph_task_id() == -1:  # noqa: SLF001
            self.require_followed()
            with self._residency.lock:
                self._look(list(self._now))

    def _look(self, keys: Iterable[tuple[str, For]], *, older: bool = False, but: Place | None = None) -> None:
        """Compare copies, and free those that nobody has, but those of the weight `but` that were not written to."""
        written: set[str] = set()
        from_forward = False
        for key in keys:
            one = self._now[key]
            # Examined first: code that has it now may write to it later.
            is_held = one.is_held
            if is_held and but not in (None, one.place):
                continue
            is_written = one.compare()
            if is_written or not (is_held or one.place is but):
                del self._now[key]
            if is_written:
                written.add(one.place.name)
                from_forward |= key[1] == "inside"
                # A view in a graph shares the parameter's counter.
                one.place.note_version()
                self._older += [one] if is_held else []
        for one in self._older if older else ():
            if one.compare():
                written.add(one.place.name)
        if older:
            self._older = [one for one in self._older if one.is_held]
        if written:
            raise UsageError(
                f"{', '.join(sorted(written))} of an offloaded model was written to through .data, detach(), a view, "
                f"numpy() or a state dict, which have copies of weights; what was written is not in the model: {DOORS}"
                f"{f' ({BEFORE_FORWARD})' if from_forward else ''}"
            )

    def require_released(self, names: Collection[str]) -> None:
        """Before a commit that changes these weights: refuse views that would keep the old values in silence.

        Raises:
            UsageError: user code has one; nothing was changed.
        """
        held = self._views_of(names)
        if held:
            # Cycles that nobody can reach hold some until they are collected.
            gc.collect()
            held = self._views_of(names)
        for _ in range(_LOOKS):
            if not held or threading.active_count() == 1:
                break
            # A view within an expression of another thread is gone in a moment.
            time.sleep(_PAUSE_SECONDS)
            held = self._views_of(names)
        if held:
            raise UsageError(
                f"{', '.join(sorted(held))} is about to change, and your code holds a view of it that would keep "
                "the values of before: .data, detach(), a slice, numpy(), or a graph that saved one. Release it "
                "before step(), or take a snapshot: p.detach().clone()"
            )

    def _views_of(self, names: Collection[str]) -> set[str]:
        with self._residency.lock:
            every = [*self._now.values(), *self._older]
        return {one.place.name for one in every if not one.is_snapshot and one.place.name in names and one.is_held}

    def require_followed(self) -> None:
        """Refuse views from a forward that a module keeps beyond its next one: in memory they would follow the weight.

        A view that a module takes anew in each forward is gone by then, and so is one that autograd had. Each is looked
        for once, in attributes of modules: what else keeps memory may be a graph.

        Raises:
            UsageError: a module has one.
        """
        if not self._stale:
            return
        with self._residency.lock:
            used = self._residency.units.order.last_used
            living = [one for one in self._stale if not one.memory.expired()]
            due = {one.memory.cdata: one for one in living if used.get(one.home.index, 0) > one.last_used}
            self._stale = [one for one in living if one.memory.cdata not in due]
            for where, tensor in attributes(self._residency.model) if due else ():
                storage = storage_of(tensor)
                found = None if storage is None else due.get(storage._cdata)  # noqa: SLF001
                if found is not None:
                    self._stale.append(found)
                    raise UsageError(
                        f"{where} is a view of {found.name_of(tensor)!r} that an earlier forward took, and the weight "
                        "has changed since: in memory the view would follow it. Take it anew in each forward; or keep "
                        "a copy, weight.detach().clone()"
                    )

    # --- what becomes of them -------------------------------------------------------------

    def age(self, names: Collection[str]) -> None:
        """These weights have other values: copies of them are handed out no more."""
        units = self._residency.units
        with self._residency.lock:
            for key in [key for key in self._now if key[0] in names]:
                one = self._now.pop(key)
                self._older += [one] if one.is_held else []
                if one.is_held and key[1] == "inside":
                    self._note_stale(units.home_of[key[0]], StorageWeakRef(one.values.untyped_storage()), one.place)
            for home in {id(home): home for home in map(units.home_of.__getitem__, names)}.values():
                if home.weak is not None and not home.weak[0].expired():
                    self._note_stale(home, home.weak[0])

    def _note_stale(self, home: Home, memory: StorageWeakRef, place: Place | None = None) -> None:
        last_used = self._residency.units.order.last_used.get(home.index, 0)
        self._stale.append(_Stale(home, place, memory, last_used))

    def close(self) -> None:
        """Release them."""
        with self._residency.lock:
            self._now.clear()
            self._older.clear()
            self._stale.clear()


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Out of sight of dispatch modes: a selective checkpoint counts operations, and ours depend on what is cached."""
    is_any = torch._C._len_torch_dispatch_stack()  # noqa: SLF001
    return _disable_current_modes() if is_any else contextlib.nullcontext()


class _StateDicts(threading.local):
    """Whether this thread makes a state dict, for which a weight that is detached is copied: no step changes these."""

    being_made = False


state_dicts = _StateDicts()


def checksum(values: torch.Tensor, place: Place) -> str:
    """Of a parameter's values, wherever they are and however they are laid out."""
    with torch.no_grad():
        if tuple(values.stride()) != place.stride and values.numel() > 1:
            laid_out = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=values.device)
            values = laid_out.copy_(values)
        return checksum_of(bytes_of(values).cpu())


class Outlived:
    """Memory that user code keeps, for as long as it does."""

    __slots__ = ("_memory", "place", "seen")

    def __init__(self, place: Place, values: torch.Tensor) -> None:
        self.place = place
        self.seen = checksum(values, place)
        weak = StorageWeakRef(values.untyped_storage())
        self._memory = (weak, values.dtype, int(values.storage_offset()), values.shape, values.stride())

    def checksum(self) -> str | None:
        """Of its values now; None where the memory is gone."""
        weak, dtype, offset, shape, stride = self._memory
        storage = alive(weak)
        return None if storage is None else checksum(view_of(storage, dtype, offset, shape, stride), self.place)
