"""Training state on SSD and its pipelined update: the thin face of the Rust store and engine.

Without a model around it::

    store = engine.Store.create(path, [engine.Entry(name="weight", values=weight, state=engine.adam_state(weight))])
    with engine.Engine(store) as updates:
        updates.update("weight", gradient, lr=1e-3, step=1)
        updates.commit(1)
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from memascend import _core
from memascend.chunk import Chunk, adapter
from memascend.compact import compact_of, master_of
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    import torch

    # An entry, as the extension takes it.
    _Tensor = tuple[str, str, list[int]]
    _Described = tuple[bool, int, _Tensor, list[_Tensor], list[int], str | None]

__all__ = [
    "CHUNK_ELEMENTS",
    "PAGE_BYTES",
    "Checksum",
    "Chunk",
    "Engine",
    "Entry",
    "Fetch",
    "Part",
    "Sizes",
    "Store",
    "adam_state",
    "compact_of",
    "master_of",
    "order_of",
    "sizes",
]

# Elements of a chunk: 768 KiB of Adam's state, and 128 KiB of 16-bit values.
CHUNK_ELEMENTS = 65_536
# What memory that a unit is fetched into begins on, and what its bytes are a multiple of.
PAGE_BYTES = 4096
# Gradients that may wait in the queue, in bytes, unless the caller says otherwise.
_QUEUE_BYTES = 256 << 20
_CHUNKS = 4

_Path = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A parameter or a persistent buffer, with the values and the state that a new store begins with.

    Attributes:
        name: its name, which no other entry has.
        values: a CPU tensor without gaps; on the meta device, what is only described.
        state: its state tensors by name, likewise.
        unit: the name of its unit; entries of a unit follow each other.
        buffer: a persistent buffer and not a parameter.
        order: its dimensions from the one with the largest stride to the one with the smallest, where it is not
            row-major (`order_of` tells). Bytes are stored in that order: values, gradients and state of its shape have
            these strides, other state is row-major.
        spill: the dtype of gradients that may be spilled; None makes no room for them.
    """

    name: str
    values: torch.Tensor
    state: Mapping[str, torch.Tensor]
    unit: str = "all"
    buffer: bool = False
    order: tuple[int, ...] | None = None
    spill: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a store takes, in bytes.

    Attributes:
        total_bytes: on storage, all of it.
        slot_bytes: one slot of all values and state.
        index_bytes: memory while it is open that grows with the state.
        buffer_bytes: memory while it is open, whatever it holds.
        chunk_bytes: memory of one staging chunk of an `Engine`.
        other_bytes: memory of an `Engine` for state of other shapes than its entries'.
        unit_bytes: the values of each unit, as `Store.fetch` gives them.
    """

    total_bytes: int
    slot_bytes: int
    index_bytes: int
    buffer_bytes: int
    chunk_bytes: int
    other_bytes: int
    unit_bytes: dict[str, int]


def sizes(
    entries: Sequence[Entry],
    *,
    optimizer: str = "AdamW",
    chunk_elements: int = CHUNK_ELEMENTS,
    devices: int = 1,
    stripe: int | None = None,
) -> Sizes:
    """What `Store.create` would take for these entries, whose tensors may be on the meta device. Touches no device.

    Raises:
        ConfigError: they cannot be stored; the message says why.
    """
    units, described = _description(entries)
    *all_bytes, of_units = _core.store_sizes(described, units, optimizer, chunk_elements, devices, stripe)
    total, slot, index, buffer, chunk, other = all_bytes
    return Sizes(
        total_bytes=total,
        slot_bytes=slot,
        index_bytes=index,
        buffer_bytes=buffer,
        chunk_bytes=chunk,
        other_bytes=other,
        unit_bytes=dict(zip(units, of_units, strict=True)),
    )


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions of a tensor without gaps from the largest stride to the smallest; None where it is row-major.

    Raises:
        ConfigError: the tensor has gaps or overlaps itself.
    """
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if not tensor.permute(order).is_contiguous():
        raise ConfigError("the tensor has gaps or overlaps itself; make a contiguous copy")
    return order


def adam_state(
    values: torch.Tensor, master: torch.Tensor | None = None, *, compact: bool = False
) -> dict[str, torch.Tensor]:
    """The state that Adam begins with: a float32 master where `values` has 16 bits, and two moments of zeros.

    Args:
        values: the parameter.
        master: what it is rounded from; its own values in float32 where it is not given.
        compact: for bfloat16, keep no second copy of the master: 10 bytes for an element, and not 12 (see
            `memascend.compact`). Other types are as without it.
    """
    import torch

    if compact and values.dtype == torch.bfloat16:
        return compact_of(values, {} if master is None else {"master": master})
    zeros = {name: torch.zeros_like(values, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    if values.dtype == torch.float32:
        return zeros
    return {"master": values.float() if master is None else master, **zeros}


class Part(NamedTuple):
    """A part of a tensor of an entry, in the order in which it is stored.

    Attributes:
        of: the state tensor's name; "" is the values.
        start: its first element.
        values: the elements.
    """

    of: str
    start: int
    values: torch.Tensor


class Checksum:
    """XXH3-64 of bytes that come one after the other, as `xxhsum -H3` gives it."""

    __slots__ = ("_core",)

    def __init__(self) -> None:
        self._core = _core.Checksum()

    def update(self, tensor: torch.Tensor) -> None:
        """Take the bytes of a contiguous CPU tensor."""
        self._core.update(tensor.data_ptr(), tensor.nbytes)

    def __str__(self) -> str:
        return f"{self._core.value():016x}"


class Store:
    """State on SSD: every commit is all of a step or none of it, and every byte that is read was checked."""

    __slots__ = ("_core", "_entries", "_names", "_units")

    def __init__(self, core: _core.Store) -> None:
        self._core = core
        self._units: list[str] = core.info()["units"]
        self._entries = core.entries()
        self._names = {entry["name"]: index for index, entry in enumerate(self._entries)}

    @classmethod
    def create(
        cls,
        paths: _Path | Sequence[_Path],
        entries: Sequence[Entry],
        *,
        optimizer: str = "AdamW",
        existing: Literal["refuse", "resume", "replace"] = "refuse",
        durability: Literal["step", "close", "none"] = "step",
        chunk_elements: int = CHUNK_ELEMENTS,
        stripe: int | None = None,
        backend: Literal["auto", "io_uring", "threads"] = "auto",
        fill: bool = True,
    ) -> Self:
        """Make a store and fill it, as step 0; or resume the one that is there, whose own values then stand.

        Args:
            paths: a folder, a file or a raw block device, or several, over which it is striped.
            entries: what it holds, grouped by unit.
            optimizer: whose state it is; a store of another one is refused.
            existing: what to do where a store is already: refuse, resume its last committed step, or replace it.
            durability: "step": commits survive a loss of power; "close": the death of the process; "none": nothing is
                kept before `close()`.
            chunk_elements: elements of a chunk, a multiple of 2,048.
            stripe: bytes that lie together on one of several devices.
            backend: how the devices are driven.
            fill: False leaves a store that was made now unfilled, at generation 0, for the caller to fill and commit:
                its entries may be on the meta device. Until its first commit nobody can open it.

        Raises:
            ConfigError: an argument is wrong, or a store is there that does not fit or that `existing` refuses.
            StorageError: a device is full, foreign or in use; nothing was changed.
            CorruptionError: the store that is there is damaged; the message says where.
        """
        units, described = _description(entries)
        if fill:
            for entry in entries:
                for tensor in (entry.values, *entry.state.values()):
                    _laid_out(entry.name, tensor, entry.order if tensor.shape == entry.values.shape else None)
        core = _core.Store(
            _paths(paths), described, units, optimizer, chunk_elements, existing, durability, stripe, backend
        )
        store = cls(core)
        if core.created and fill:
            for entry in entries:
                store.stage(entry.name, entry.values, entry.state, step=0)
            store.commit(0)
        return store

    @classmethod
    def open(
        cls,
        paths: _Path | Sequence[_Path],
        *,
        durability: Literal["step", "close", "none"] = "step",
        backend: Literal["auto", "io_uring", "threads"] = "auto",
    ) -> Self:
        """Open the last committed step of the store that is there.

        Raises:
            StorageError: there is none, or it is unfinished, unclosed, of another version, or misses a device.
            CorruptionError: it is damaged; the message says where.
        """
        return cls(_core.Store(_paths(paths), None, [], "", CHUNK_ELEMENTS, "resume", durability, None, backend))

    @property
    def created(self) -> bool:
        """Whether it was made now."""
        return self._core.created

    @property
    def step(self) -> int:
        """Committed steps."""
        step: int = self._core.info()["step"]
        return step

    @property
    def user_state(self) -> Any:
        """The JSON value that was committed last; None where there was none."""
        text = self._core.info()["user"]
        return json.loads(text) if text else None

    @property
    def hyperparameters(self) -> Any:
        """The hyperparameters that were committed last; None where there were none."""
        text = self._core.info()["hyperparameters"]
        return json.loads(text) if text else None

    def info(self) -> dict[str, Any]:
        """What is known of it: "uuid", "generation", "step", "optimizer", "units", "devices" and sizes in bytes."""
        return self._core.info()

    def entries(self) -> list[dict[str, Any]]:
        """Each entry: "name", "buffer", "unit", "dtype", "shape", "step", "version", "staged", "compact", "state".

        Also "unit_offset", where its values begin in the bytes of its unit, and "order" and "spill" as in `Entry`.
        """
        return self._core.entries()

    def stage(
        self, name: str, values: torch.Tensor, state: Mapping[str, torch.Tensor] | None = None, *, step: int
    ) -> None:
        """Stage a whole entry, as its update number `step`; `commit()` makes it live.

        Of a compact entry, `state` is the compact one, or what `compact_of` makes it from.
        """
        entry = self._entries[self.index(name)]
        state = self._compact(entry, values, state or {})
        wanted = [tensor[0] for tensor in entry["state"]]
        if sorted(state) != sorted(wanted):
            raise ConfigError(f"the state of {name!r} is {wanted}, not {list(state)}")
        tensors = [values, *(state[of] for of in wanted)]
        described = [(entry["dtype"], entry["shape"]), *((dtype, shape) for _, dtype, shape in entry["state"])]
        for tensor, (dtype, shape) in zip(tensors, described, strict=True):
            _require(name, tensor, dtype, shape, _order(entry, shape))
        self._core.stage(self.index(name), step, [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])

    def read(self, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A copy of an entry as the last commit left it: its values, and its state by name.

        Raises:
            CorruptionError: what is on storage is not what was written.
        """
        import torch

        index = self.index(name)
        entry = self._entries[index]

        def room(dtype: str, shape: list[int]) -> torch.Tensor:
            order = _order(entry, shape) or tuple(range(len(shape)))
            laid_out = torch.empty([shape[dim] for dim in order], dtype=getattr(torch, dtype))
            return laid_out.permute([order.index(dim) for dim in range(len(shape))])

        values = room(entry["dtype"], entry["shape"])
        state = {of: room(dtype, shape) for of, dtype, shape in entry["state"]}
        self._core.read(index, [(tensor.data_ptr(), tensor.nbytes) for tensor in (values, *state.values())])
        return values, state

    def scan(self, names: Sequence[str], visit: Callable[[str, list[Part]], object]) -> None:
        """Read entries as the last commit left them, part by part, in memory that does not grow with them.

        Args:
            names: which, in the order in which they are read.
            visit: called with a name and parts that belong together: of a chunk, the values and the state of the same
                elements; tensors of another shape come by themselves. The parts stand on memory that is taken again
                after the call. It must not commit.

        Raises:
            CorruptionError: what is on storage is not what was written.
        """
        import torch

        entries = self._entries
        described = {
            self.index(name): [
                ("", entry["dtype"]),
                *((of, dtype) for of, dtype, _ in entry["state"]),
            ]
            for name, entry in ((name, entries[self.index(name)]) for name in names)
        }

        def shown(index: int, lent: list[tuple[int, int, Any]]) -> None:
            parts = []
            for tensor, first, memory in lent:
                of, dtype = described[index][tensor]
                values = torch.frombuffer(memory, dtype=getattr(torch, dtype))
                parts.append(Part(of, first // values.itemsize, values))
            visit(entries[index]["name"], parts)

        self._core.scan(list(described), shown)

    def fetch(self, unit: str, into: torch.Tensor) -> Fetch:
        """Begin to read the values of a unit, as the last commit left them, before all other I/O that waits.

        Args:
            unit: its name.
            into: a contiguous uint8 CPU tensor of as many bytes as `sizes` says, which begins on a page. Each entry is
                at its "unit_offset". It is held until the end, and must not be touched before.

        Raises:
            ConfigError: there is no such unit, or the memory does not fit.
            StorageError: the device refused; or the store is closed (UsageError).
        """
        units = self._units
        if unit not in units:
            raise ConfigError(f"the store has no unit {unit!r}")
        if str(into.dtype) != "torch.uint8" or into.device.type != "cpu" or not into.is_contiguous():
            raise ConfigError("a unit is fetched into a contiguous uint8 tensor on the CPU")
        if into.data_ptr() % PAGE_BYTES:
            raise ConfigError(f"the memory that a unit is fetched into must begin on a page of {PAGE_BYTES} bytes")
        keep = into.untyped_storage()
        return Fetch(self._core.fetch(units.index(unit), into.data_ptr(), into.nbytes, keep))

    def counters(self) -> dict[str, Any]:
        """Since it was opened: "fetches", "fetched_bytes", "wait_seconds" in `Fetch.wait`, and all I/O.

        "read_bytes" and "written_bytes" count every transfer of the volume, those of fetches and updates too.
        """
        return self._core.counters()

    def commit(self, step: int, *, user_state: Any = None, hyperparameters: Any = None) -> int:
        """Make all that is staged live at once; None leaves what was committed before. Returns the generation."""
        return self._core.commit(step, _json(user_state), _json(hyperparameters))

    def discard(self, name: str | None = None) -> None:
        """Forget all that is staged, or what is staged of one entry."""
        self._core.discard(None if name is None else self.index(name))

    def verify(self, progress: Callable[[int, int], object] | None = None) -> tuple[int, int]:
        """Read and check everything that is live; `progress(done, all)` hears of bytes.

        Returns:
            How many pieces and bytes were found whole.

        Raises:
            CorruptionError: the first piece that is not.
        """
        return self._core.verify(progress)

    def close(self) -> None:
        """Keep what was committed, drop what is only staged, and let go of the devices. Twice is fine."""
        self._core.close()

    def index(self, name: str) -> int:
        """The number of an entry."""
        if name not in self._names:
            raise ConfigError(f"the store has no entry {name!r}")
        return self._names[name]

    @staticmethod
    def _compact(
        entry: dict[str, Any], values: torch.Tensor, state: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        return compact_of(values, state) if entry["compact"] and "rest" not in state else state

    def _live(self, name: str, values: torch.Tensor | None) -> tuple[int, int, object] | None:
        if values is None:
            return None
        entry = self._entries[self.index(name)]
        _require(name, values, entry["dtype"], entry["shape"], entry["order"])
        return _place(values)

    def _gradient(self, name: str, gradient: torch.Tensor) -> int:
        index = self.index(name)
        if list(gradient.shape) != self._entries[index]["shape"]:
            raise ConfigError(
                f"the gradient of {name!r} has shape {list(gradient.shape)}, not {self._entries[index]['shape']}"
            )
        _laid_out(name, gradient, self._entries[index]["order"])
        return index

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Fetch:
    """A unit on its way into memory; `Store.fetch` makes it. Any thread may use it.

    Until it was waited for, or is dropped, the slots that it reads are not written: the step after the next commit
    waits for it. Dropping it waits for the device.
    """

    __slots__ = ("_core",)

    def __init__(self, core: _core.Fetch) -> None:
        self._core = core

    def wait(self) -> int:
        """Wait for the device, without the GIL, and check every byte. Ctrl-C ends the wait, not the read.

        Returns:
            The newest version among its entries (the generation that wrote it). Waiting again says the same again.

        Raises:
            StorageError: the device failed.
            CorruptionError: what is on storage is not what was written; the message names entry and chunk.
        """
        return self._core.wait()

    def done(self) -> bool:
        """Whether the device is done with it, well or not. Never waits."""
        return self._core.done()


class Engine:
    """The pipelined update: state is read, computed and written in chunks, beside whatever else runs."""

    __slots__ = ("_core", "store")

    store: Store

    def __init__(self, store: Store, *, chunks: int = _CHUNKS, queue: int = _QUEUE_BYTES, whole: int = 0) -> None:
        """Start one on a store.

        Args:
            store: what it updates.
            chunks: staging chunks (2 to 64).
            queue: bytes of gradients that may wait; a larger one is let in alone.
            whole: bytes for an entry in one piece, for `apply(whole=True)`.
        """
        self.store = store
        self._core = _core.Engine(store._core, chunks, queue, whole)  # noqa: SLF001

    def fill(
        self, name: str, values: torch.Tensor, state: Mapping[str, torch.Tensor] | None = None, *, step: int = 0
    ) -> None:
        """Queue the first values of an entry, and return when they have room in the queue.

        Nothing is read. The tensors are held until they were used, and must not
        change meanwhile.

        Args:
            name: of which entry.
            values: contiguous, on the CPU, as they are described.
            state: tensors by name. One that is not given is zeros, or the values where it is a float32 "master" of the
                entry's shape. A compact entry takes a "master", too, and no "rest" then; that the values are what it is
                rounded to is found out as it is written.
            step: the entry's count of updates, which the state is the result of.

        Raises:
            ConfigError: a tensor does not fit; nothing was begun.
            StorageError: a job of this step failed; the step can only be discarded.
        """
        index = self.store.index(name)
        entry = self.store._entries[index]  # noqa: SLF001
        given = dict(state or {})
        _require(name, values, entry["dtype"], entry["shape"], entry["order"])
        master = given.pop("master", None) if entry["compact"] and "rest" not in given else None
        if master is not None:
            _require(name, master, "float32", entry["shape"], entry["order"])
        places = []
        for of, dtype, shape in entry["state"]:
            tensor = given.pop(of, None)
            if tensor is not None:
                _require(name, tensor, dtype, shape, _order(entry, shape))
            places.append(None if tensor is None else _place(tensor))
        if given:
            raise ConfigError(f"{name!r} has no state called {next(iter(given))!r}")
        self._core.fill(index, _place(values), places, None if master is None else _place(master), step)

    def update(
        self,
        name: str,
        gradient: torch.Tensor,
        *,
        step: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        decoupled: bool = True,
        grad_scale: float = 1.0,
        maximize: bool = False,
        values: torch.Tensor | None = None,
    ) -> None:
        """Begin the update of a parameter, and return when its gradient has room in the queue.

        The gradient is held until it was used, and must not change meanwhile. The numbers are those of
        `memascend.kernels.adamw`, whose bits come out; `decoupled=False` is Adam.

        `values` may be given where the parameter is resident, as the last commit left it: where the update starts from
        them (float32 or compact), they are then not read. They are held like the gradient and checked like what is
        read; nothing writes to them.

        Raises:
            ConfigError: the gradient, the values or a number do not fit; nothing was begun.
            UsageError: the values of an update of this step were not those of the last commit; the step can only be
                discarded.
            StorageError: an update of this step failed; the step can only be discarded.
        """
        index = self.store._gradient(name, gradient)  # noqa: SLF001
        numbers = (lr, betas, eps, weight_decay, decoupled, step, grad_scale, maximize)
        live = self.store._live(name, values)  # noqa: SLF001
        self._core.update(index, _place(gradient), _dtype_name(gradient), live, numbers)

    def spill(self, name: str, gradient: torch.Tensor, *, add: bool = False) -> None:
        """Queue a gradient to wait on storage; with `add`, add it to the one that is there, with the bits of `add_`.

        Returns when the gradient has room in the queue. It is held until it was used, and must not change meanwhile.
        What is spilled is no part of a step: commits leave it, and it is forgotten when the store is closed.
        A job of this kind that fails or is discarded leaves nothing there.

        Raises:
            ConfigError: the entry was described without `spill`, or the gradient has another dtype or shape.
            UsageError: nothing is there to add to.
            StorageError: a job of this step failed; the step can only be discarded.
        """
        index = self.store._gradient(name, gradient)  # noqa: SLF001
        self._core.spill(index, _place(gradient), _dtype_name(gradient), add)

    def spilled(self, name: str) -> tuple[bool, float]:
        """Of the spilled gradient: whether a non-finite is in it, and the sum of its squares (in float64).

        Waits for what is queued of the entry; both were computed as the gradient was written.

        Raises:
            UsageError: nothing is spilled of it.
        """
        return self._core.spilled(self.store.index(name))

    def read_spilled(self, name: str, into: torch.Tensor) -> None:
        """Read the spilled gradient into a tensor of its shape and dtype, after what is queued of the entry.

        Raises:
            UsageError: nothing is spilled of it.
            CorruptionError: what is on storage is not what was written; the step can only be discarded.
        """
        index = self.store._gradient(name, into)  # noqa: SLF001
        wanted = self.store._entries[index]["spill"]  # noqa: SLF001
        if wanted is not None and _dtype_name(into) != wanted:
            raise ConfigError(f"the gradient of {name!r} spills as {wanted}, not {_dtype_name(into)}")
        self._core.read_spilled(index, _place(into))

    def update_spilled(
        self,
        name: str,
        *,
        step: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        decoupled: bool = True,
        grad_scale: float = 1.0,
        maximize: bool = False,
        factors: Sequence[float] = (),
        values: torch.Tensor | None = None,
    ) -> None:
        """As `update`, by the gradient that is spilled, which stays there.

        Args:
            name: of which parameter.
            step: as in `update`, and so are the numbers after it.
            lr: see above.
            betas: see above.
            eps: see above.
            weight_decay: see above.
            decoupled: see above.
            grad_scale: see above.
            maximize: see above.
            factors: the gradient is multiplied by each in turn first, with the bits of torch's `mul_`.
            values: as in `update`.

        Raises:
            UsageError: nothing is spilled of it.
        """
        numbers = (lr, betas, eps, weight_decay, decoupled, step, grad_scale, maximize)
        live = self.store._live(name, values)  # noqa: SLF001
        self._core.update_spilled(self.store.index(name), [float(factor) for factor in factors], live, numbers)

    def drop_spilled(self, name: str) -> None:
        """Forget the spilled gradient, after what is queued of the entry. Fine where there is none."""
        self._core.drop_spilled(self.store.index(name))

    def apply(
        self,
        name: str,
        function: Callable[[Chunk], object],
        *,
        step: int,
        gradient: torch.Tensor | None = None,
        whole: bool = False,
    ) -> None:
        """Queue arithmetic that is not ours, and return when its gradient has room in the queue.

        `function` is called on the engine's thread, without gradients being recorded, with a `Chunk` of an entry after
        the other, in order; what it writes there is staged. It must not wait for the engine. The tensors stand on the
        engine's memory: one of them (or a view) that is kept beyond the call fails the step, so keep a `clone()`.

        Args:
            name: of which entry.
            function: called once for each chunk, or once with all of the entry.
            step: the entry's count of updates, this one included.
            gradient: held until it was used, and must not change meanwhile; None takes the one that is spilled.
            whole: give all of the entry in one piece, of its shape, in the memory that `Engine(whole=)` set aside.

        Raises:
            ConfigError: the gradient does not fit, or the entry takes more than `Engine(whole=)`; the message has both
                numbers. Nothing was begun.
            UsageError: no gradient was given and none is spilled. Also, from a later call: the function raised; what it
                raised is the cause, and the step can only be discarded.
        """
        index = self.store.index(name) if gradient is None else self.store._gradient(name, gradient)  # noqa: SLF001
        entry = self.store._entries[index]  # noqa: SLF001
        nbytes = 0 if gradient is None else gradient.nbytes
        call = adapter(function, entry, gradient, whole=whole)
        self._core.apply(index, call, nbytes, step, gradient is None, whole)

    def finish(self) -> None:
        """Wait until every update is staged."""
        self._core.finish()

    def commit(self, step: int, *, user_state: Any = None, hyperparameters: Any = None) -> int:
        """Wait for every update and make the step live, all of it at once. Returns the generation."""
        return self._core.commit(step, _json(user_state), _json(hyperparameters))

    def discard(self, name: str | None = None) -> None:
        """Drop what waits, drain what is in flight, forget what was staged: all of it, or of one entry alone.

        A step that failed is over when all of it was discarded, and not before.
        """
        self._core.discard(None if name is None else self.store.index(name))

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that it holds, beside the gradients in its queue."""
        return self._core.staging_bytes

    def trace(self, path: _Path) -> None:
        """Record what happens to the store, until `trace_end`, into a new file for Perfetto or chrome://tracing.

        Reads, writes and flushes; what the engine's thread computes and waits for; waits for fetched units. Some 150
        bytes of file for each, and nothing is spent on it while no trace is recorded.

        Raises:
            StorageError: the file exists, or cannot be made.
            ConfigError: a trace is being recorded already.
        """
        self.store._core.trace(os.fspath(path))  # noqa: SLF001

    def trace_end(self) -> None:
        """End the trace, as closing the store does too. Nothing happens where there is none.

        Raises:
            StorageError: the file could not be written whole.
        """
        self.store._core.trace_end()  # noqa: SLF001

    def counters(self) -> dict[str, Any]:
        """Jobs and chunks, bytes by kind, bytes "queued" and the most of them, and "seconds" by what its thread did."""
        return self._core.counters()

    def close(self) -> None:
        """Drain what is in flight and end its thread; what was not committed is lost. Twice is fine."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _paths(paths: _Path | Sequence[_Path]) -> list[str]:
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return [os.fspath(path) for path in several]


def _description(entries: Sequence[Entry]) -> tuple[list[str], list[_Described]]:
    numbers: dict[str, int] = {}
    described: list[_Described] = []
    for entry in entries:
        order = list(entry.order or ())
        # Written only where it says something, so that the same tensors are the same description.
        order = [] if order == list(range(entry.values.dim())) else order
        spill = None if entry.spill is None else str(entry.spill).removeprefix("torch.")
        state = [_described(name, tensor) for name, tensor in entry.state.items()]
        unit = numbers.setdefault(entry.unit, len(numbers))
        described.append((entry.buffer, unit, _described(entry.name, entry.values), state, order, spill))
    return list(numbers), described


def _order(entry: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, ...] | None:
    """In which order a tensor of an entry is stored: state of its shape lies as its values do."""
    return entry["order"] if list(shape) == entry["shape"] else None


def _described(name: str, tensor: torch.Tensor) -> tuple[str, str, list[int]]:
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _place(tensor: torch.Tensor) -> tuple[int, int, object]:
    """Address, bytes, and what keeps them valid."""
    return tensor.data_ptr(), tensor.nbytes, tensor.untyped_storage()


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _json(value: Any) -> str | None:
    if value is None:
        return None
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"only JSON values can be committed: {error}") from error


def _laid_out(name: str, tensor: torch.Tensor, order: Sequence[int] | None) -> None:
    if tensor.device.type != "cpu":
        raise ConfigError(f"the tensors of {name!r} must be on the CPU, not on {tensor.device}")
    if order is None and not tensor.is_contiguous():
        raise ConfigError(f"the tensors of {name!r} must be contiguous")
    if order is not None and not (len(order) == tensor.dim() and tensor.permute(tuple(order)).is_contiguous()):
        raise ConfigError(f"the tensors of {name!r} must have their dimensions in memory in the order {list(order)}")


def _require(name: str, tensor: torch.Tensor, dtype: str, shape: list[int], order: Sequence[int] | None) -> None:
    _laid_out(name, tensor, order)
    got = str(tensor.dtype).removeprefix("torch.")
    if got != dtype or list(tensor.shape) != shape:
        raise ConfigError(f"a tensor of {name!r} is {got} of shape {list(tensor.shape)}, not {dtype} of {shape}")
