"""Gives user code copies of weights, and rejects writes to the copies.

[Note: places of a weight] Only the values of the last commit are valid for a weight. Their bytes can be in the places
of this table. User code can change weights only through a door: `edit()`, `load_state_dict()` or
`materialized(modify=True)`. A door commits the new values at its end.

| place | memory | may be written by | ends with |
|---|---|---|---|
| `Bytes.OFFLOADED` | the store's slots, on storage | the engine, into the slot that is not valid | the next commit |
| `Bytes.READING` | a lease of the arena | the read | the read: verified (`CACHED`), or failed (`OFFLOADED`) |
| `Bytes.CACHED` | a lease of the arena | no code: `_version` shows a write, and `step()` raises | eviction, a commit |
| `Bytes.IN_PLACE` | the RAM tier | the engine at a commit; no other code: `_version` shows a write | `close()` |
| `TrackedCopy`, a view (`.data`, `detach()`) | a file | no code: a checksum shows a write | release, before a commit |
| `TrackedCopy`, a snapshot (`state_dict()`) | a file | no code: a checksum shows a write | release |
| inside `materialized()`, `edit()` | a file | user code | the end of the block; a door commits changes |
| a deep copy of the model | a file | user code: the copy belongs to another model | release |

A copy that is made inside a forward or a backward is a snapshot, too.

This module creates the files of copies, and keeps track of the copies. `unit` and `cached_units` handle bytes in units;
`session.value_edits` and `session.materialize` implement the doors.
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
    from memascend.params.unit import CachedUnit

# --- copies in files ---------------------------------------------------------------------

# The largest number of bytes in one write to the file of a copy.
_WRITE_BYTES = 8 << 20


def filed_copy(place: Place, values: torch.Tensor, folder: Path | None) -> torch.Tensor:
    """Returns a copy of a parameter's values, with the parameter's strides, on an unlinked file.

    `folder` is the folder for the file. It is None if the storage is a raw device and the user named no folder.
    """
    if folder is None:
        raise ConfigError(
            "the storage is a raw device, which cannot hold copies of the weights: pass a folder for these copies as "
            "offload(scratch=)"
        )
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
                # Drop the file's pages from the page cache: the copy may be larger than free memory.
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return file_memory(file.fileno(), nbytes).view(place.dtype).as_strided(place.shape, place.stride)
    except OSError as error:
        raise StorageError(
            f"cannot write a copy of the weights to {folder}: {error.strerror}; pass another folder as "
            "offload(scratch=)",
            errno=error.errno,
            path=str(folder),
        ) from error
    finally:
        # The traceback of an error would keep these tensors alive, and with them the slot of the unit.
        del values, part, on_host


# --- copies that user code has -----------------------------------------------------------

DOORS = (
    "write to weights within optimizer.edit(parameter) or memascend.materialized(model, modify=True), or by "
    "model.load_state_dict()"
)
# Added to an error if a forward may have written to the model's weights: inside a forward no door can be opened.
BEFORE_FORWARD = (
    "if a forward writes to weights, as nn.Embedding(max_norm=) and normalised weights do, let the training loop write "
    "to them before the forward, within optimizer.edit(), as docs/limits.md shows"
)
# The purpose of a copy. User code must release a "view" before a commit changes the weight. A copy for a "state dict",
# or "inside" a forward or a backward, is a snapshot: it may outlive the commit.
For = Literal["view", "inside", "state dict"]
# How many recent copies `of` checks for writes at each call. Whenever the number of copies has doubled, `of` checks all
# copies.
_FEW = 16
# How often `require_released` looks again for views that another thread may have, and the pause before each look.
_LOOKS, _PAUSE_SECONDS = 20, 0.005


class TrackedCopy:
    """A copy of a weight that user code may have.

    Attributes:
        seen: the checksum of the copy's values at the last comparison, or at the creation of the copy.
    """

    __slots__ = ("_sharing_count", "is_snapshot", "place", "seen", "values")

    def __init__(self, place: Place, values: torch.Tensor, *, is_snapshot: bool, sharing_count: int = 1) -> None:
        """`is_snapshot`: the copy may outlive a change of the weight.

        `sharing_count`: how many copies share the memory of `values`.
        """
        self._sharing_count = sharing_count
        self.place = place
        self.is_snapshot = is_snapshot
        self.seen = checksum(values, place)
        # `view_of` makes a tensor without a base: a base would count as another user of the memory.
        self.values = view_of(
            values.untyped_storage(), values.dtype, int(values.storage_offset()), values.shape, values.stride()
        )

    @property
    def is_held(self) -> bool:
        """True if user code still uses the memory of the copy."""
        return uses(self.values) > uses_of_one() + self._sharing_count - 1

    def compare(self) -> bool:
        """True if the values changed since the last call or, in the first call, since the copy was made."""
        before, self.seen = self.seen, checksum(self.values, self.place)
        return before != self.seen


class _Stale(NamedTuple):
    """Memory that other code still uses, with values that weights had before a commit."""

    unit: CachedUnit
    place: Place | None  # the parameter in the memory; None if the memory has all parameters of the unit
    memory: StorageWeakRef
    last_used: int  # the number of the unit's last use before the commit

    def name_of(self, view: torch.Tensor) -> str:
        """Returns the name of the parameter that has the first element of `view`, a view of this memory."""
        if self.place is not None:
            return self.place.name
        begin = int(view.storage_offset()) * view.element_size()
        return max((place.offset, place.name) for place in self.unit.places if place.offset <= begin)[1]


class WeightCopies:
    """The copies of a model's weights that user code has.

    A copy that user code has released is dropped at the next comparison.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        # Copies of the present values, which `of` returns again; the key is the weight's name and the purpose of the
        # copy.
        self._now: dict[tuple[str, For], TrackedCopy] = {}
        # Copies that `of` no longer returns, and memory that `keep` tracks, if user code still has them.
        self._older: list[TrackedCopy] = []
        # Memory with the weights of a forward. Other code still used this memory when a commit changed the weights.
        self._stale: list[_Stale] = []
        # At this length of `_now`, `of` compares all copies and not only the recent copies.
        self._many = _FEW

    @property
    def computes(self) -> bool:
        """True if this thread is inside a forward or a backward."""
        return bool(torch._C._current_graph_task_id() != -1) or self._residency.frames.inside  # noqa: SLF001

    # --- making copies --------------------------------------------------------------------

    def of(self, place: Place) -> torch.Tensor:
        """Returns a copy of a weight for user code.

        Repeated calls for the same purpose return the same memory until the weight changes.

        Raises:
            UsageError: code wrote to an earlier copy, or the run was closed.
            MemascendError: the values cannot be read, or `filed_copy` cannot make the copy.
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
                # A state dict stays on the host: it may be larger than the device's memory.
                values = values if of == "state dict" else values.to(place.device)
                one = self._now[place.name, of] = TrackedCopy(place, values, is_snapshot=of != "view")
            return one.values.detach()

    def plain_copy(self, place: Place) -> torch.nn.Parameter:
        """Returns a plain parameter on the copy from `of`, for a function that was called on the placeholder."""
        return place.plain(self.of(place))

    @contextlib.contextmanager
    def materialized(self, places: list[Place]) -> Iterator[None]:
        """Context manager in which a graph can refer to parameters, because their data are copies from `of`."""
        residency = self._residency
        values = [self.of(place) for place in places]
        with residency.turns.alone(), contextlib.ExitStack() as undo:
            if any(residency.units.unit_of[place.name].holders for place in places):
                raise UsageError(
                    "another thread is computing the model, so this thread cannot make a view of its weights: make "
                    "views in the other thread, or after its computation"
                )
            if residency.hooks.push():
                undo.callback(residency.hooks.pop)
            for place, one in zip(places, values, strict=True):
                undo.callback(place.offload)
                place.materialize(one)
            yield

    def duplicate(self, place: Place) -> torch.nn.Parameter:
        """Returns a plain parameter for another model. Its values are a copy in a separate file."""
        self._residency.units.require_open()
        with torch.inference_mode(mode=False), torch.no_grad():
            return place.plain(self._residency.copy_of(place).to(place.device))

    def keep(self, kept: Sequence[tuple[Place, torch.Tensor]], *, is_snapshot: bool) -> None:
        """Tracks memory that `edit()` or `materialized()` gave to user code, as long as user code uses this memory.

        Several tensors in `kept` may be parts of one vector.
        """
        sharing_count = Counter(values.untyped_storage()._cdata for _, values in kept)  # noqa: SLF001
        with self._residency.lock:
            for place, values in kept:
                count = sharing_count[values.untyped_storage()._cdata]  # noqa: SLF001
                self._older.append(TrackedCopy(place, values, is_snapshot=is_snapshot, sharing_count=count))

    # --- checking -------------------------------------------------------------------------

    def require_unwritten(self, *, loads: bool = False) -> None:
        """Rejects writes to copies; call it before a step, a save, a change of values, and the end of the run.

        `loads`: user code is about to load a state dict. User code may have changed this state dict first, so writes to
        copies for a state dict are accepted.

        Raises:
            UsageError: code wrote to a copy; raised once for each write. Nothing was changed.
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
        """Rejects writes to copies of the present values, and stale views in modules (`require_followed`).

        Does nothing in a forward that a backward recomputes.
        """
        if (self._now or self._stale) and torch._C._current_graph_task_id() == -1:  # noqa: SLF001
            self.require_followed()
            with self._residency.lock:
                self._look(list(self._now))

    def _look(self, keys: Iterable[tuple[str, For]], *, older: bool = False, but: Place | None = None) -> None:
        """Compares the copies of `keys` with their checksums; drops copies that user code has released or written to.

        `older`: also compares the copies in `_older`. `but`: the weight that is about to be read. Its unwritten copies
        are not dropped, and copies of other weights are compared only if user code has released them.

        Raises:
            UsageError: code wrote to a copy.
        """
        written: set[str] = set()
        from_forward = False
        for key in keys:
            one = self._now[key]
            # `is_held` is read before `compare`: in the other order, code that still has the copy could write to it
            # after the comparison and then release it.
            is_held = one.is_held
            if is_held and but not in (None, one.place):
                continue
            is_written = one.compare()
            if is_written or not (is_held or one.place is but):
                del self._now[key]
            if is_written:
                written.add(one.place.name)
                from_forward |= key[1] == "inside"
                # A view in a graph shares the parameter's `_version`, so the write has also increased this version.
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
                f"numpy() or a state dict. These are only copies of weights, so the model did not change: {DOORS}"
                f"{f' ({BEFORE_FORWARD})' if from_forward else ''}"
            )

    def require_released(self, names: Collection[str]) -> None:
        """Rejects views of weights that a commit is about to change: they would silently keep the old values.

        Raises:
            UsageError: user code has a view; nothing was changed.
        """
        held = self._views_of(names)
        if held:
            # Unreachable objects may keep views until the garbage collector frees these objects.
            gc.collect()
            held = self._views_of(names)
        for _ in range(_LOOKS):
            if not held or threading.active_count() == 1:
                break
            # A view inside an expression of another thread is soon released.
            time.sleep(_PAUSE_SECONDS)
            held = self._views_of(names)
        if held:
            raise UsageError(
                f"{', '.join(sorted(held))} is about to change, but your code holds a view of it (.data, "
                "detach(), a slice, numpy(), or a graph that saved such a view), and the view would keep the old "
                "values. Delete the view and try again, or keep a copy instead: p.detach().clone()"
            )

    def _views_of(self, names: Collection[str]) -> set[str]:
        with self._residency.lock:
            every = [*self._now.values(), *self._older]
        return {one.place.name for one in every if not one.is_snapshot and one.place.name in names and one.is_held}

    def require_followed(self) -> None:
        """Rejects a module's views of weights from an earlier forward, if these weights have changed since then.

        In training without memascend, such a view would change together with the weight. The next forward replaces the
        views that a module takes in each forward, and autograd deletes its own views before the next forward. For each
        stale memory, this method searches for views once, and only in attributes of modules: other users of the memory
        may be graphs.

        Raises:
            UsageError: a module has such a view.
        """
        if not self._stale:
            return
        with self._residency.lock:
            used = self._residency.units.order.last_used
            living = [one for one in self._stale if not one.memory.expired()]
            due = {one.memory.cdata: one for one in living if used.get(one.unit.index, 0) > one.last_used}
            self._stale = [one for one in living if one.memory.cdata not in due]
            for where, tensor in attributes(self._residency.model) if due else ():
                storage = storage_of(tensor)
                found = None if storage is None else due.get(storage._cdata)  # noqa: SLF001
                if found is not None:
                    self._stale.append(found)
                    raise UsageError(
                        f"{where} is a view of {found.name_of(tensor)!r} that an earlier forward took. The weight "
                        "has changed since then, but the view has the old values. Make the view again in each forward, "
                        "or keep a copy instead: weight.detach().clone()"
                    )

    # --- commits and the end --------------------------------------------------------------

    def age(self, names: Collection[str]) -> None:
        """Makes `of` return new copies of the weights `names`, which a commit has changed.

        Also notes memory with the old values that other code still uses, for `require_followed`.
        """
        units = self._residency.units
        with self._residency.lock:
            for key in [key for key in self._now if key[0] in names]:
                one = self._now.pop(key)
                self._older += [one] if one.is_held else []
                if one.is_held and key[1] == "inside":
                    self._note_stale(units.unit_of[key[0]], StorageWeakRef(one.values.untyped_storage()), one.place)
            for unit in {id(unit): unit for unit in map(units.unit_of.__getitem__, names)}.values():
                if unit.weak is not None and not unit.weak[0].expired():
                    self._note_stale(unit, unit.weak[0])

    def _note_stale(self, unit: CachedUnit, memory: StorageWeakRef, place: Place | None = None) -> None:
        last_used = self._residency.units.order.last_used.get(unit.index, 0)
        self._stale.append(_Stale(unit, place, memory, last_used))

    def close(self) -> None:
        """Drops all copies."""
        with self._residency.lock:
            self._now.clear()
            self._older.clear()
            self._stale.clear()


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Context manager that hides operations from dispatch modes.

    A selective checkpoint is such a mode, and counts operations. The checkpoint must not see the operations of a read,
    because these operations depend on which units are cached.
    """
    is_any = torch._C._len_torch_dispatch_stack()  # noqa: SLF001
    return _disable_current_modes() if is_any else contextlib.nullcontext()


class _StateDicts(threading.local):
    """Thread-local state."""

    # True while this thread is in `state_dict()`. Then detach() returns snapshots, which may outlive a commit.
    being_made = False


state_dicts = _StateDicts()


def checksum(values: torch.Tensor, place: Place) -> str:
    """Returns the checksum of a parameter's values in their stored order, on any device and with any strides."""
    with torch.no_grad():
        if tuple(values.stride()) != place.stride and values.numel() > 1:
            laid_out = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=values.device)
            values = laid_out.copy_(values)
        return checksum_of(bytes_of(values).cpu())


class WeakValues:
    """A weak reference to memory in which a parameter's gradient arrived, and which user code may keep.

    Attributes:
        seen: the checksum of the gradient's values when this object was made.
    """

    __slots__ = ("_memory", "place", "seen")

    def __init__(self, place: Place, values: torch.Tensor) -> None:
        self.place = place
        self.seen = checksum(values, place)
        weak = StorageWeakRef(values.untyped_storage())
        self._memory = (weak, values.dtype, int(values.storage_offset()), values.shape, values.stride())

    def checksum(self) -> str | None:
        """Returns the checksum of the present values; None if the memory is gone."""
        weak, dtype, offset, shape, stride = self._memory
        storage = alive(weak)
        return None if storage is None else checksum(view_of(storage, dtype, offset, shape, stride), self.place)
