"""Updates parameters in a pipeline: reads, computes and writes their state in chunks, in the background."""

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
    """A part of a record, or all of it; valid during the call alone."""

    # Writable in place. One-dimensional, in the order in which it is stored; of the record's shape where it is whole.
    values: torch.Tensor
    gradient: torch.Tensor | None  # alike; None where there is none
    # By name, writable in place; alike where it has the record's shape, and of a format's tensors with an item for
    # several elements (8 or 256), the items of these. Tensors of another shape are given as they are, the same memory
    # in every call, and are written after the last.
    state: dict[str, torch.Tensor]
    start: int  # the first element
    count: int  # the number of elements; 0 in the one call of a record without elements
    last: bool  # whether it is the last call


def adapter(
    function: Callable[[Chunk], object],
    record: Mapping[str, Any],
    gradient: torch.Tensor | None,
    *,
    whole: bool,
    before: Callable[[], None] | None = None,
) -> Callable[[Any, Any, Sequence[Any], int, int, bool], None]:
    """What the extension calls for a record (as `Store.records` has it): it makes tensors of lent memory.

    `before` is called each time before the gradient is read.
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
    """Compute with so many threads, as the caller does: LAPACK's last bits depend on how many there are.

    Each thread has a number of its own, all processors until torch is asked for it there.
    """
    import torch

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _tensor_on(lent: Any, dtype: str) -> torch.Tensor:
    import torch

    with memoryview(lent) as view:
        empty = view.nbytes == 0
    of = getattr(torch, dtype)
    return torch.empty(0, dtype=of, device="cpu") if empty else torch.frombuffer(lent, dtype=of)


def _parts(gradient: Any, order: Sequence[int] | None, *, whole: bool) -> Callable[[int, int], torch.Tensor | None]:
    """Gives so many elements of a gradient from one on, in the order of memory; or all of it."""
    if whole or gradient is None:
        return lambda _start, _count: None if gradient is None else gradient.cpu()
    flat = (gradient if order is None else gradient.permute(tuple(order))).reshape(-1)
    return lambda start, count: flat[start : start + count].cpu()


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
    """Which update of the record it is, from 1 on."""
    grad_scale: float = 1.0
    maximize: bool = False
    seed: int = 0
    """What is rounded by chance draws from this, the record's name, `step` and the element's index: 0 to 2**64 - 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Momentum:
    """The numbers of an update of SGD with momentum, for a record whose format says how its momentum lies."""

    lr: float = 1e-3
    momentum: float
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    step: int
    """Which update of the record it is, from 1 on; the first one begins the momentum with the gradient."""
    grad_scale: float = 1.0
    maximize: bool = False
    seed: int = 0
    """As in `Adam`."""


class Engine(_core.Engine):
    """The pipelined update: state is read, computed and written in chunks, beside whatever else runs."""

    __slots__ = ()

    def fill(
        self, name: str, values: torch.Tensor, state: Mapping[str, torch.Tensor] | None = None, *, step: int = 0
    ) -> None:
        """Queue the first values of a record, and return when they have room in the queue.

        Nothing is read. The tensors are contiguous and on the CPU; they are held until they were used, and must not
        change meanwhile. State that is not given is zeros, or the values where it is a float32 "master" of the record's
        shape. What the record's format has otherwise may be given in float32: a "master" in place of the rest, which
        the values must be rounded from (that is found out as it is written); and moments, which are rounded to nearest.
        `step` is the record's count of updates, which the state is the result of.

        Raises:
            ConfigError: a tensor does not fit; nothing was begun.
            StorageError: a job of this step failed; the step can only be discarded.
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
            raise ConfigError(f"{name!r} has no state called {next(iter(given))!r}")
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
        """Queue arithmetic that is not ours, and return when its gradient has room in the queue.

        `function` is called on a thread of the engine's, no two at once, without gradients being recorded, with a
        `Chunk` of a record after the other, in order; what it writes there is staged. It must not wait for the engine.
        The tensors stand on the engine's memory: one of them (or a view) that is kept beyond the call fails the step,
        so keep a `clone()`. `step` is the record's count of updates, this one included. Gradient and values (as in
        `update`) are held until they were used, and must not change meanwhile; without a gradient, the one that is
        spilled is taken.

        `whole` gives all of the record in one piece, of its shape, in the memory that `Engine(whole=)` set aside. Its
        state in a format of its own is then given in float32 ("master" of 16-bit values, and moments), unless there is
        no master. It is written in its format again, and 16-bit values are their master, rounded. While the function
        computes, other records are read and written.

        `after_commit` calls the function once the step is committed, in memory, if the record is in RAM and the store's
        durability is "none". Nothing of the record is read or written then. What the function raises ends
        the run, so it must be one that does not fail.

        Raises:
            ConfigError: the gradient does not fit, or the record takes more than `Engine(whole=)`; the message has both
                numbers. Nothing was begun.
            UsageError: no gradient was given and none is spilled. Also, from a later call: the function raised; what it
                raised is the cause, and the step can only be discarded.
        """
        given = gradient.tensor if isinstance(gradient, Lent) else gradient
        before = gradient.order if isinstance(gradient, Lent) else None
        record = self.store.record(name)
        call = adapter(function, record, given, whole=whole, before=before)
        how = whole, whole and is_widened(record), after_commit
        self.apply_at(name, call, gradient, step, values, how)

    def commit(self, step: int, *, user_state: Any = None, hyperparameters: Any = None) -> int:
        """Wait for every update and make the step live, all of it at once. Returns the generation."""
        return self.store.make_live(self.commit_as, step, user_state, hyperparameters)
