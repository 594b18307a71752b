"""Updates parameters in a pipeline: a background thread reads state in chunks, computes, and writes the results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend import _core
from memascend.errors import ConfigError
from memascend.storage.formats import is_widened, wide_parts, wide_state
from memascend.storage.records import Lent, place_of, require, stored_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


@dataclass(kw_only=True, eq=False)
class Chunk:
    """The tensors for one call of a function given to `Engine.apply`; valid only during that call.

    A chunk is a range of the record's elements in stored order, or with `apply(whole=True)` the whole record.
    """

    # Values of the chunk, writable in place: one-dimensional, or in the record's shape under `apply(whole=True)`.
    values: torch.Tensor
    gradient: torch.Tensor | None  # gradient of the same elements, in the same layout; None if the job has no gradient
    # State tensors by name, writable in place. Of a state tensor with the record's shape, the dict has this chunk's
    # part, in the layout of `values`. Of a state tensor with one item for every 8 or 256 elements (as in some formats),
    # the dict has the items of this chunk. Any other state tensor is passed whole, in the same memory in every call;
    # the engine writes such a tensor to storage after the last call.
    state: dict[str, torch.Tensor]
    start: int  # index of the chunk's first element in the record
    count: int  # number of elements; 0 in the only call for a record without elements
    last: bool  # True in the last call for the record


def adapter(
    function: Callable[[Chunk], object],
    record: Mapping[str, Any],
    gradient: torch.Tensor | None,
    *,
    whole: bool,
    before: Callable[[], None] | None = None,
) -> Callable[[Any, Any, Sequence[Any], int, int, bool], None]:
    """Returns a callback for the extension. The callback calls `function` with a `Chunk` in the engine's memory.

    `record` is an item of `Store.records`. The callback first calls `before()`, and then reads the gradient.
    """
    import torch

    from memascend.tensors import strides_of

    described = wide_state(record) if whole and is_widened(record) else record["state"]
    part_of = _parts(gradient, record["order"], whole=whole)
    threads = torch.get_num_threads()

    def call(values: Any, spilled: Any, state: Sequence[Any], start: int, count: int, last: bool) -> None:
        if before is not None:
            before()
        _take_threads(threads)

        def tensor(lent: Any, dtype: str, shape: Sequence[int]) -> torch.Tensor:
            flat, is_own = _tensor_on(lent, dtype), list(shape) == list(record["shape"])
            if not whole and (is_own or flat.numel() != math.prod(shape)):
                return flat
            return flat.as_strided(tuple(shape), strides_of(shape, record["order"] if is_own else None))

        chunk = Chunk(
            values=tensor(values, record["dtype"], record["shape"]),
            gradient=part_of(start, count) if spilled is None else tensor(spilled, record["spill"], record["shape"]),
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
    """Sets the number of threads that torch uses in calls from the current thread.

    torch keeps a separate number for each thread, and a new thread begins with torch's default. The last bits of
    LAPACK's results depend on this number. So the engine's threads must use the number of the thread that called
    `apply`.
    """
    import torch

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _tensor_on(lent: Any, dtype: str) -> torch.Tensor:
    """Returns a one-dimensional tensor in the memory of a buffer. The buffer may be empty, which torch rejects."""
    import torch

    with memoryview(lent) as view:
        empty = view.nbytes == 0
    of = getattr(torch, dtype)
    return torch.empty(0, dtype=of, device="cpu") if empty else torch.frombuffer(lent, dtype=of)


def _parts(gradient: Any, order: Sequence[int] | None, *, whole: bool) -> Callable[[int, int], torch.Tensor | None]:
    """Returns a function of (start, count) that returns a slice of a gradient in stored order, on the CPU.

    With `whole`, the function returns the whole gradient in its own shape. Without a gradient, it returns None.
    """
    if whole or gradient is None:
        return lambda _start, _count: None if gradient is None else gradient.cpu()
    flat = (gradient if order is None else gradient.permute(tuple(order))).reshape(-1)
    return lambda start, count: flat[start : start + count].cpu()


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """The hyperparameters of one Adam update. On fp32 state, the update has the bits of `memascend.kernels.adamw`."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled: bool = True
    """True: AdamW's decoupled weight decay. False: Adam, which adds the decay to the gradient."""
    step: int
    """The number of this update of the record, from 1."""
    grad_scale: float = 1.0
    maximize: bool = False
    seed: int = 0
    """The seed of stochastic rounding, 0 to 2**64 - 1.

    The random bits of an element depend on the seed, the record's name, `step`, and the element's index.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Momentum:
    """The hyperparameters of one update by SGD with momentum; the record's format tells how its momentum is stored."""

    lr: float = 1e-3
    momentum: float
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    step: int
    """The number of this update of the record, from 1. Update 1 sets the momentum to the gradient."""
    grad_scale: float = 1.0
    maximize: bool = False
    seed: int = 0
    """The seed of stochastic rounding, as in `Adam`."""


class Engine(_core.Engine):
    """Updates the records of a store on its own thread, which reads, computes and writes their state in chunks."""

    __slots__ = ()

    def fill(
        self, name: str, values: torch.Tensor, state: Mapping[str, torch.Tensor] | None = None, *, step: int = 0
    ) -> None:
        """Queues the first values and state of a record; returns when the queue has room for them.

        The tensors must be on the CPU, contiguous in the record's order of dimensions. The engine refers to the tensors
        until they are written; do not change the tensors meanwhile. A missing state tensor is filled with zeros, or
        with the values if it is a float32 "master" of the record's shape.

        State that the record's format stores in fewer bits may be given in float32. A float32 "master" then replaces
        "rest". If the rounded master differs from `values`, the job fails when the master is written. Moments are
        rounded to the nearest stored value.

        `step` is the number of updates that led to this state.

        Raises:
            ConfigError: a tensor does not match the record; nothing was begun.
            MemascendError: an earlier job of this step failed; the step can only be discarded.
        """
        record = self.store.record(name)
        given = dict(state or {})
        require(name, values, record["dtype"], record["shape"], record["order"])
        wide = wide_parts(record, given)
        for tensor in wide:
            if tensor is not None:
                require(name, tensor, "float32", record["shape"], record["order"])
        places = []
        for of, dtype, shape in record["state"]:
            tensor = given.pop(of, None)
            if tensor is not None:
                require(name, tensor, dtype, shape, stored_order(record, shape))
            places.append(None if tensor is None else place_of(tensor))
        if given:
            raise ConfigError(f"{name!r} has no state tensor called {next(iter(given))!r}: leave it out")
        master, first, second = (None if tensor is None else place_of(tensor) for tensor in wide)
        self.fill_at(self.store.index(name), place_of(values), places, (master, first, second), step)

    def apply(
        self,
        name: str,
        function: Callable[[Chunk], object],
        *,
        step: int,
        gradient: torch.Tensor | Lent | None = None,
        whole: bool = False,
        values: torch.Tensor | None = None,
        after_commit: bool = False,
    ) -> None:
        """Queues an update by a Python function; returns when the queue has room for its gradient.

        A thread of the engine calls `function` under `no_grad` with the `Chunk`s of the record in order. The engine
        stages the values and state that `function` writes there, and runs one function at a time. `function` must not
        wait for the engine. The chunk's tensors are views of the engine's memory. If `function` keeps such a tensor, or
        a view of it, after the call, the step fails: keep a `clone()` instead.

        The engine refers to `gradient` and `values` (see `update`) until the update ends; do not change them meanwhile.
        Without `gradient`, the engine uses the spilled gradient. `step` is the number of this update of the record,
        from 1.

        `whole` passes the record in one chunk, of the record's shape, in the memory that `Engine(whole=)` reserves. In
        most formats with a master (see `is_widened`), state that is stored in fewer bits is passed in float32 (the
        moments and, for 16-bit values, "master"), and encoded again afterwards. 16-bit values then become the rounded
        master, whatever the function wrote to the values. The engine reads and writes other records while the function
        computes.

        `after_commit` has an effect if the record is kept in RAM and the store's durability is "none": the engine calls
        the function after the commit, on the record in RAM, without any I/O. An exception there ends the run, so the
        function must not fail.

        Raises:
            ConfigError: `gradient` or `values` do not match the record, the record needs more memory than
                `Engine(whole=)` reserves (the message has both sizes), or its format does not allow `whole`. Nothing
                was begun.
            UsageError: no gradient was given and none is spilled. A later call also raises UsageError if the function
                raised an exception, which is then the cause; the step can only be discarded.
            MemascendError: an earlier job of this step failed; the step can only be discarded.
        """
        given = gradient.tensor if isinstance(gradient, Lent) else gradient
        before = gradient.order if isinstance(gradient, Lent) else None
        record = self.store.record(name)
        call = adapter(function, record, given, whole=whole, before=before)
        how = whole, whole and is_widened(record), after_commit
        self.apply_at(name, call, gradient, step, values, how)

    def commit(self, step: int, *, user_state: Any = None, hyperparameters: Any = None) -> int:
        """Waits for all queued updates, then commits them as `step` in one atomic write; returns the new generation."""
        return self.store.commit_with_ranks(self.commit_as, step, user_state, hyperparameters)
