"""Updates parameters in a pipeline: reads, computes and writes their state in chunks, in the background."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from memascend import _core
from memascend.errors import ConfigError
from memascend.storage.entries import Lent, dtype_of, place_of, require, stored_order
from memascend.storage.formats import is_widened, wide_parts, wide_state
from memascend.tensors import summed
from memascend.text import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from memascend.storage.store import Store
    from memascend.tensors import Squares


@dataclass(kw_only=True, eq=False)
class Chunk:
    """A part of an entry, or all of it; valid during the call alone.

    Attributes:
        values: writable in place. One-dimensional, in the order in which it is stored; of the entry's shape where it is
            whole.
        gradient: alike; None where there is none.
        state: by name, writable in place; alike where it has the entry's shape, and of a format's tensors with an item
            for several elements (8 or 256), the items of these. Tensors of another shape are given as they are, the
            same memory in every call, and are written after the last.
        start: the first element.
        count: how many; 0 in the one call of an entry without elements.
        last: whether it is the last call.
    """

    values: torch.Tensor
    gradient: torch.Tensor | None
    state: dict[str, torch.Tensor]
    start: int
    count: int
    last: bool


def adapter(
    function: Callable[[Chunk], object],
    entry: Mapping[str, Any],
    gradient: torch.Tensor | None,
    *,
    whole: bool,
    before: Callable[[], None] | None = None,
) -> Callable[[Any, Any, Sequence[Any], int, int, bool], None]:
    """What the extension calls for an entry (as `Store.entries` has it): it makes tensors of lent memory.

    `before` is called each time before the gradient is read.
    """
    import torch

    described = wide_state(entry) if whole and is_widened(entry) else entry["state"]
    part_of = _parts(gradient, entry["order"], whole=whole)
    threads = torch.get_num_threads()

    def call(values: Any, spilled: Any, state: Sequence[Any], start: int, count: int, last: bool) -> None:
        if before is not None:
            before()
        _take_threads(threads)

        def tensor(lent: Any, dtype: str, shape: Sequence[int]) -> torch.Tensor:
            flat, is_own = _tensor_on(lent, dtype), list(shape) == list(entry["shape"])
            is_part = not whole and (is_own or flat.numel() != math.prod(shape))
            return flat if is_part else _laid(flat, shape, entry["order"] if is_own else None)

        chunk = Chunk(
            values=tensor(values, entry["dtype"], entry["shape"]),
            gradient=part_of(start, count) if spilled is None else tensor(spilled, entry["spill"], entry["shape"]),
            state={
                name: tensor(lent, dtype, shape) for (name, dtype, shape), lent in zip(described, state, strict=True)
            },
            start=start,
            count=count,
            last=last,
        )
        with torch.no_grad():
            function(chunk)

    return call


def _take_threads(threads: int) -> None:
    """Compute with so many threads, as the caller does: LAPACK's last bits depend on how many there are.

    Each thread has a number of its own, all processors until torch is asked for it there.
    """
    import torch

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _tensor_on(lent: Any, dtype: str) -> torch.Tensor:
    """Elements on lent memory."""
    import torch

    with memoryview(lent) as view:
        empty = view.nbytes == 0
    of = getattr(torch, dtype)
    return torch.empty(0, dtype=of, device="cpu") if empty else torch.frombuffer(lent, dtype=of)


def _laid(flat: torch.Tensor, shape: Sequence[int], order: Sequence[int] | None) -> torch.Tensor:
    """Elements in a shape, whose dimensions follow each other in memory in this order."""
    if order is None:
        return flat.view(shape)
    return flat.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


def _parts(gradient: Any, order: Sequence[int] | None, *, whole: bool) -> Callable[[int, int], torch.Tensor | None]:
    """Gives so many elements of a gradient from one on, in the order of memory; or all of it."""
    if whole or gradient is None:
        return lambda _start, _count: None if gradient is None else gradient.cpu()
    made_in_parts: Callable[[int, int], torch.Tensor] | None = getattr(gradient, "elements", None)
    if made_in_parts is not None:
        return made_in_parts
    flat = (gradient if order is None else gradient.permute(tuple(order))).reshape(-1)
    return lambda start, count: flat[start : start + count].cpu()


# Gradients that may wait in the queue, in bytes, unless the caller says otherwise.
_QUEUE_BYTES = 256 << 20


_CHUNKS = 12


_Path = str | os.PathLike[str]


Late = Literal["never", "rehearsed", "always"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """The numbers of an update, those of `memascend.kernels.adamw`, whose bits come out."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled: bool = True
    """False is Adam without the W."""
    step: int
    """Which update of the entry it is, from 1 on."""
    grad_scale: float = 1.0
    maximize: bool = False
    seed: int = 0
    """What is rounded by chance draws from this, the entry's name, `step` and the element's index: 0 to 2**64 - 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Momentum:
    """The numbers of an update of SGD with momentum, for an entry whose format says how its momentum lies."""

    lr: float = 1e-3
    momentum: float
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    step: int
    """Which update of the entry it is, from 1 on; the first one begins the momentum with the gradient."""
    grad_scale: float = 1.0
    maximize: bool = False
    seed: int = 0
    """As in `Adam`."""


# In the order in which Rust takes them; where there is no eps, it is momentum.
_of_adam = attrgetter("lr", "betas", "eps", "weight_decay", "decoupled", "step", "grad_scale", "maximize", "seed")


_of_both = attrgetter("step", "grad_scale", "maximize", "seed")


def _listed(numbers: Adam | Momentum) -> tuple[Any, ...]:
    if isinstance(numbers, Adam):
        return _of_adam(numbers)
    of_momentum = (numbers.momentum, numbers.dampening)
    return (numbers.lr, of_momentum, None, numbers.weight_decay, numbers.nesterov, *_of_both(numbers))


class Engine(Closing):
    """The pipelined update: state is read, computed and written in chunks, beside whatever else runs."""

    __slots__ = ("_core", "store")

    store: Store

    def __init__(
        self, store: Store, *, chunks: int = _CHUNKS, queue: int = _QUEUE_BYTES, whole: int = 0, threads: int = 1
    ) -> None:
        """Start one on a store.

        Args:
            store: what it updates.
            chunks: staging chunks (2 to 64). Twelve keep a disk as busy as I/O alone does; four reach 0.8 of it.
            queue: bytes of gradients that may wait; a larger one is let in alone.
            whole: bytes for an entry in one piece, for `apply(whole=True)`.
            threads: that the updates of held entries run on at the end of a step.
        """
        self.store = store
        self._core = _core.Engine(store._core, chunks, queue, whole, threads)  # noqa: SLF001

    def replay(self, progress: Callable[[int, int], object] | None = None) -> bool:
        """End the log that a store has which was not closed: apply its gradients, and write and commit their entries.

        Before anything else is done with the store. It is the state of its last step then, as it was in memory, and
        interrupting it leaves the store as it was.

        Args:
            progress: called with bytes of gradients done and of all; what it raises ends the work.

        Returns:
            Whether there was a log.

        Raises:
            CorruptionError: a gradient of the log, or the state that it is applied to, is not what was written.
            ConfigError: another version wrote the log, with arithmetic that is not known here.
        """
        return self._core.replay(progress)

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
                entry's shape. What the entry's format has otherwise may be given in float32: a "master" in place of the
                rest, which the values must be rounded from (that is found out as it is written); and moments, which are
                rounded to nearest.
            step: the entry's count of updates, which the state is the result of.

        Raises:
            ConfigError: a tensor does not fit; nothing was begun.
            StorageError: a job of this step failed; the step can only be discarded.
        """
        index = self.store.index(name)
        entry = self.store.descriptions[index]
        given = dict(state or {})
        require(name, values, entry["dtype"], entry["shape"], entry["order"])
        wide = wide_parts(entry, given)
        for tensor in wide:
            if tensor is not None:
                require(name, tensor, "float32", entry["shape"], entry["order"])
        places = []
        for of, dtype, shape in entry["state"]:
            tensor = given.pop(of, None)
            if tensor is not None:
                require(name, tensor, dtype, shape, stored_order(entry, shape))
            places.append(None if tensor is None else place_of(tensor))
        if given:
            raise ConfigError(f"{name!r} has no state called {next(iter(given))!r}")
        master, first, second = (None if tensor is None else place_of(tensor) for tensor in wide)
        self._core.fill(index, place_of(values), places, (master, first, second), step)

    def update(
        self, name: str, gradient: torch.Tensor | Lent, numbers: Adam | Momentum, *, values: torch.Tensor | None = None
    ) -> None:
        """Begin the update of a parameter, and return when its gradient has room in the queue.

        The gradient is held until it was used, and must not change meanwhile.

        `values` may be given where the parameter is resident, as the last commit left it: where the update starts from
        them (float32 or compact), they are then not read. They are held like the gradient and checked like what is
        read; nothing writes to them.

        Raises:
            ConfigError: the gradient, the values or a number do not fit; nothing was begun.
            UsageError: the values of an update of this step were not those of the last commit; the step can only be
                discarded.
            StorageError: an update of this step failed; the step can only be discarded.
        """
        index = self.store.descriptions.gradient(name, gradient)
        live = self.store.descriptions.live(name, values)
        self._core.update(index, place_of(gradient), dtype_of(gradient), live, _listed(numbers))

    def update_spilling(
        self, name: str, gradient: torch.Tensor | Lent, numbers: Adam | Momentum, *, values: torch.Tensor | None = None
    ) -> None:
        """As `update`, of an entry that is not held, and as `spill`: the gradient is written as it is used.

        `take_back` discards the update and leaves the gradient, for another one.

        Raises:
            ConfigError: also where the entry is held, or was described without `spill`; nothing was begun.
        """
        index = self.store.descriptions.gradient(name, gradient)
        live = self.store.descriptions.live(name, values)
        self._core.update_spilling(index, place_of(gradient), dtype_of(gradient), live, _listed(numbers))

    def spill(self, name: str, gradient: torch.Tensor | Lent, *, add: bool = False) -> None:
        """Queue a gradient to wait on storage; with `add`, add it to the one that is there, with the bits of `add_`.

        Returns when the gradient has room in the queue. It is held until it was used, and must not change meanwhile.
        What is spilled is no part of a step: commits leave it, and it is forgotten when the store is closed.
        A job of this kind that fails or is discarded leaves nothing there.

        Raises:
            ConfigError: the entry was described without `spill`, or the gradient has another dtype or shape.
            UsageError: nothing is there to add to.
            StorageError: a job of this step failed; the step can only be discarded.
        """
        index = self.store.descriptions.gradient(name, gradient)
        self._core.spill(index, place_of(gradient), dtype_of(gradient), add)

    def spilled(self, name: str) -> tuple[bool, Squares]:
        """Of the spilled gradient: whether a non-finite is in it, and the sum of its squares, not rounded.

        Waits for what is queued of the entry; both were computed as the gradient was written.

        Raises:
            UsageError: nothing is spilled of it.
        """
        found, squares = self._core.spilled(self.store.index(name))
        return found, summed(*squares)

    def read_spilled(self, name: str, into: torch.Tensor) -> None:
        """Read the spilled gradient into a tensor of its shape and dtype, after what is queued of the entry.

        Raises:
            UsageError: nothing is spilled of it.
            CorruptionError: what is on storage is not what was written; the step can only be discarded.
        """
        index = self.store.descriptions.gradient(name, into)
        wanted = self.store.descriptions[index]["spill"]
        if wanted is not None and dtype_of(into) != wanted:
            raise ConfigError(f"the gradient of {name!r} spills as {wanted}, not {dtype_of(into)}")
        self._core.read_spilled(index, place_of(into))

    def update_spilled(
        self, name: str, numbers: Adam | Momentum, *, factors: Sequence[float] = (), values: torch.Tensor | None = None
    ) -> None:
        """As `update`, by the gradient that is spilled, which stays there.

        Args:
            name: of which parameter.
            numbers: as in `update`.
            factors: the gradient is multiplied by each in turn first, with the bits of torch's `mul_`.
            values: as in `update`.

        Raises:
            UsageError: nothing is spilled of it.
        """
        live = self.store.descriptions.live(name, values)
        index = self.store.index(name)
        self._core.update_spilled(index, [float(factor) for factor in factors], live, _listed(numbers))

    def drop_spilled(self, name: str) -> None:
        """Forget the spilled gradient, after what is queued of the entry. Fine where there is none."""
        self._core.drop_spilled(self.store.index(name))

    def apply(
        self,
        name: str,
        function: Callable[[Chunk], object],
        *,
        step: int,
        gradient: torch.Tensor | Lent | None = None,
        whole: bool = False,
        values: torch.Tensor | None = None,
        late: Late = "never",
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
            whole: give all of the entry in one piece, of its shape, in the memory that `Engine(whole=)` set aside. Its
                state in a format of its own is then given in float32 ("master" of 16-bit values, and moments), unless
                there is no master. It is written in its format again, and 16-bit values are their master, rounded.
            values: as in `update`; they are held like the gradient.
            late: where nothing is durable before the end, and the entry is held, it may be called once the step is
                committed ("always"), on the entry in memory, of which then nothing is read or written. What it raises
                ends the run. "rehearsed": it is called on a copy before, too, which is dropped, so that what it raises
                there ends the step alone; it does the same both times.

        Raises:
            ConfigError: the gradient does not fit, or the entry takes more than `Engine(whole=)`; the message has both
                numbers. Nothing was begun.
            UsageError: no gradient was given and none is spilled. Also, from a later call: the function raised; what it
                raised is the cause, and the step can only be discarded.
        """
        index = self.store.index(name) if gradient is None else self.store.descriptions.gradient(name, gradient)
        entry = self.store.descriptions[index]
        given = gradient.tensor if isinstance(gradient, Lent) else gradient
        nbytes = 0 if given is None else given.nbytes
        before = gradient.order if isinstance(gradient, Lent) else None
        call = adapter(function, entry, given, whole=whole, before=before)
        live = self.store.descriptions.live(name, values)
        how = whole, whole and is_widened(entry), late != "never", late == "rehearsed"
        self._core.apply(index, call, nbytes, step, gradient is None, live, how)

    def probe(self, nbytes: int, seconds: float) -> tuple[int, float]:
        """Read what storage has of the state, for at most so many bytes and seconds, while nothing else is begun.

        Returns:
            The bytes that were read, and how long that took.
        """
        return self._core.probe(nbytes, seconds)

    def finish(self) -> None:
        """Wait until every update is staged."""
        self._core.finish()

    def drain(self) -> None:
        """As `finish`, but for updates of held entries, which begin with that or with `commit()`."""
        self._core.settle()

    def commit(self, step: int, *, user_state: Any = None, hyperparameters: Any = None) -> int:
        """Wait for every update and make the step live, all of it at once. Returns the generation."""
        return self.store.make_live(self._core.commit, step, user_state, hyperparameters)

    def discard(self, name: str | None = None) -> None:
        """Drop what waits, drain what is in flight, forget what was staged: all of it, or of one entry alone.

        A step that failed is over when all of it was discarded, and not before.
        """
        self._core.discard(None if name is None else self.store.index(name))

    def take_back(self, name: str) -> None:
        """Forget what was staged of an entry once it has ended: unlike after `discard`, what it spilled is there."""
        self._core.take_back(self.store.index(name))

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that it holds, beside the gradients in its queue."""
        return self._core.staging_bytes

    @property
    def queued_bytes(self) -> int:
        """Bytes of gradients that wait or are being used now, "queued" of `counters()`."""
        return self._core.queued_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes of gradients of held entries that wait for their step, "waiting" of `counters()`."""
        return self._core.waiting_bytes

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
