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
from typing import TYPE_CHECKING, Any, Literal, Self

from memascend import _core
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    import torch

__all__ = ["CHUNK_ELEMENTS", "Engine", "Entry", "Store", "adam_state"]

# Elements of a chunk: 768 KiB of Adam's state, and 128 KiB of 16-bit values.
CHUNK_ELEMENTS = 65_536
# Gradients that may wait in the queue, in bytes, unless the caller says otherwise.
_QUEUE_BYTES = 256 << 20
_CHUNKS = 4

_Path = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A parameter or a persistent buffer, with the values and the state that a new store begins with.

    Attributes:
        name: its name, which no other entry has.
        values: a contiguous CPU tensor.
        state: its state tensors by name, each a contiguous CPU tensor.
        unit: the name of its unit; entries of a unit follow each other.
        buffer: a persistent buffer and not a parameter.
    """

    name: str
    values: torch.Tensor
    state: Mapping[str, torch.Tensor]
    unit: str = "all"
    buffer: bool = False


def adam_state(values: torch.Tensor, master: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The state that Adam begins with: a float32 master where `values` has 16 bits, and two moments of zeros."""
    import torch

    zeros = {name: torch.zeros(values.shape, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    if values.dtype == torch.float32:
        return zeros
    return {"master": values.float() if master is None else master, **zeros}


class Store:
    """State on SSD: every commit is all of a step or none of it, and every byte that is read was checked."""

    __slots__ = ("_core", "_entries", "_names")

    def __init__(self, core: _core.Store) -> None:
        self._core = core
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

        Raises:
            ConfigError: an argument is wrong, or the store that is there does not fit.
            StorageError: a device is full, foreign, in use, or holds a store; nothing was changed.
            CorruptionError: the store that is there is damaged; the message says where.
        """
        units = list(dict.fromkeys(entry.unit for entry in entries))
        described = [
            (
                entry.buffer,
                units.index(entry.unit),
                _described(entry.name, entry.values),
                [_described(name, tensor) for name, tensor in entry.state.items()],
            )
            for entry in entries
        ]
        core = _core.Store(
            _paths(paths), described, units, optimizer, chunk_elements, existing, durability, stripe, backend
        )
        store = cls(core)
        if core.created:
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
        """Each entry: "name", "buffer", "unit", "dtype", "shape", "step", "version", "staged", "state"."""
        return self._core.entries()

    def stage(
        self, name: str, values: torch.Tensor, state: Mapping[str, torch.Tensor] | None = None, *, step: int
    ) -> None:
        """Stage a whole entry, as its update number `step`; `commit()` makes it live."""
        entry = self._entries[self.index(name)]
        state = state or {}
        wanted = [tensor[0] for tensor in entry["state"]]
        if sorted(state) != sorted(wanted):
            raise ConfigError(f"the state of {name!r} is {wanted}, not {list(state)}")
        tensors = [values, *(state[of] for of in wanted)]
        described = [(entry["dtype"], entry["shape"]), *((dtype, shape) for _, dtype, shape in entry["state"])]
        for tensor, (dtype, shape) in zip(tensors, described, strict=True):
            _require(name, tensor, dtype, shape)
        self._core.stage(self.index(name), step, [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])

    def read(self, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A copy of an entry as the last commit left it: its values, and its state by name.

        Raises:
            CorruptionError: what is on storage is not what was written.
        """
        import torch

        index = self.index(name)
        entry = self._entries[index]
        values = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        state = {of: torch.empty(shape, dtype=getattr(torch, dtype)) for of, dtype, shape in entry["state"]}
        self._core.read(index, [(tensor.data_ptr(), tensor.nbytes) for tensor in (values, *state.values())])
        return values, state

    def commit(self, step: int, *, user_state: Any = None, hyperparameters: Any = None) -> int:
        """Make all that is staged live at once; None leaves what was committed before. Returns the generation."""
        return self._core.commit(step, _json(user_state), _json(hyperparameters))

    def discard(self) -> None:
        """Forget all that is staged."""
        self._core.discard()

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

    def _gradient(self, name: str, gradient: torch.Tensor) -> int:
        index = self.index(name)
        if list(gradient.shape) != self._entries[index]["shape"]:
            raise ConfigError(
                f"the gradient of {name!r} has shape {list(gradient.shape)}, not {self._entries[index]['shape']}"
            )
        _contiguous(name, gradient)
        return index

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Engine:
    """The pipelined update: state is read, computed and written in chunks, beside whatever else runs."""

    __slots__ = ("_core", "store")

    store: Store

    def __init__(self, store: Store, *, chunks: int = _CHUNKS, queue: int = _QUEUE_BYTES) -> None:
        """Start one on a store.

        Args:
            store: what it updates.
            chunks: staging chunks (2 to 64).
            queue: bytes of gradients that may wait; a larger one is let in alone.
        """
        self.store = store
        self._core = _core.Engine(store._core, chunks, queue)  # noqa: SLF001

    def fill(self, name: str, values: torch.Tensor, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """Queue the first values of an entry, and return when they have room in the queue.

        Nothing is read; the entry's count of updates becomes 0. The tensors are held until they were used, and must not
        change meanwhile.

        Args:
            name: of which entry.
            values: contiguous, on the CPU, as they are described.
            state: tensors by name. One that is not given is zeros, or the values where it is a float32 "master" of the
                entry's shape.

        Raises:
            ConfigError: a tensor does not fit; nothing was begun.
            StorageError: a job of this step failed; the step can only be discarded.
        """
        index = self.store.index(name)
        entry = self.store._entries[index]  # noqa: SLF001
        given = dict(state or {})
        _require(name, values, entry["dtype"], entry["shape"])
        places = []
        for of, dtype, shape in entry["state"]:
            tensor = given.pop(of, None)
            if tensor is not None:
                _require(name, tensor, dtype, shape)
            places.append(None if tensor is None else _place(tensor))
        if given:
            raise ConfigError(f"{name!r} has no state called {next(iter(given))!r}")
        self._core.fill(index, _place(values), places)

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
    ) -> None:
        """Begin the update of a parameter, and return when its gradient has room in the queue.

        The gradient is held until it was used, and must not change meanwhile. The numbers are those of
        `memascend.kernels.adamw`, whose bits come out; `decoupled=False` is Adam.

        Raises:
            ConfigError: the gradient or a number does not fit; nothing was begun.
            StorageError: an update of this step failed; the step can only be discarded.
        """
        index = self.store._gradient(name, gradient)  # noqa: SLF001
        numbers = (lr, betas, eps, weight_decay, decoupled, step, grad_scale, maximize)
        keep = gradient.untyped_storage()
        dtype = str(gradient.dtype).removeprefix("torch.")
        self._core.update(index, gradient.data_ptr(), gradient.nbytes, dtype, keep, numbers)

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

    def counters(self) -> dict[str, Any]:
        """Updates and chunks, bytes by kind, and "seconds" by what its thread did."""
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


def _described(name: str, tensor: torch.Tensor) -> tuple[str, str, list[int]]:
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _place(tensor: torch.Tensor) -> tuple[int, int, object]:
    """Address, bytes, and what keeps them valid."""
    return tensor.data_ptr(), tensor.nbytes, tensor.untyped_storage()


def _json(value: Any) -> str | None:
    if value is None:
        return None
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"only JSON values can be committed: {error}") from error


def _contiguous(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigError(f"the tensors of {name!r} must be contiguous and on the CPU")


def _require(name: str, tensor: torch.Tensor, dtype: str, shape: list[int]) -> None:
    _contiguous(name, tensor)
    got = str(tensor.dtype).removeprefix("torch.")
    if got != dtype or list(tensor.shape) != shape:
        raise ConfigError(f"a tensor of {name!r} is {got} of shape {list(tensor.shape)}, not {dtype} of {shape}")
