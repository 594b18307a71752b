"""Describes the contents of a store, and checks tensors that are passed to the Rust extension against it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from memascend import _core
from memascend.errors import ConfigError
from memascend.memory import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    # A record, as the extension takes it.
    Tensor = tuple[str, str, list[int]]
    Described = tuple[bool, int, Tensor, list[Tensor], list[int], str | None, str | None, int | None]


class Lent(NamedTuple):
    """A gradient that the extension cannot reach, and a function that copies parts of it to host memory."""

    tensor: torch.Tensor  # on any device, without gaps in the order in which its parameter is stored
    # Called with (first byte, bytes) on the engine's thread. Returns an address in host memory, aligned to 8, the first
    # byte there, and the number of bytes, which contain the range. The memory does not change before the next call of
    # a window of the same engine.
    window: Callable[[int, int], tuple[int, int, int]]
    order: Callable[[], None]  # makes later work of the calling thread on it wait for the work that computes it


def place_of(tensor: torch.Tensor) -> tuple[int, int, object]:
    """Address, number of bytes, and the object that keeps them valid."""
    return tensor.data_ptr(), tensor.nbytes, tensor.untyped_storage()


def stored_order(record: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor of a record is stored: state of its shape has that of the values."""
    return record["order"] if list(shape) == record["shape"] else None


def require(name: str, tensor: torch.Tensor, dtype: str, shape: list[int], order: Sequence[int] | None) -> None:
    """Reject a tensor that is not on the CPU, has gaps in this order of dimensions, or differs from its description."""
    if tensor.device.type != "cpu":
        raise ConfigError(f"the tensors of {name!r} must be on the CPU, not on {tensor.device}")
    if order is None and not tensor.is_contiguous():
        raise ConfigError(f"the tensors of {name!r} must be contiguous")
    if order is not None and not (len(order) == tensor.dim() and tensor.permute(tuple(order)).is_contiguous()):
        raise ConfigError(f"the tensors of {name!r} must have their dimensions in memory in the order {list(order)}")
    got = str(tensor.dtype).removeprefix("torch.")
    if got != dtype or list(tensor.shape) != shape:
        raise ConfigError(f"a tensor of {name!r} is {got} of shape {list(tensor.shape)}, not {dtype} of {shape}")


# Bytes of the largest request. Disks are slower with smaller requests, and slightly larger state would need a large and
# a small one.
_REQUEST_BYTES = 1 << 20
# Elements of the largest chunk: the staging chunks of an engine, with 16-bit gradients, stay within 16 MiB.
CHUNK_ELEMENTS = 98_304
_CHUNK_GRAIN = 2_048


@dataclass(frozen=True, kw_only=True)
class Record:
    """The description of a parameter or a persistent buffer in a store.

    Attributes:
        name: its name, which no other record has.
        values: a tensor of its dtype and shape; one on the meta device is enough.
        state: tensors alike for its state, by name.
        unit: the name of its unit; records of a unit follow each other.
        buffer: a persistent buffer and not a parameter.
        order: its dimensions from the largest stride to the smallest, as `order_of` returns them; None: row-major.
            Bytes are stored in that order: values, gradients and state of its shape have these strides, other state is
            row-major.
        spill: the dtype of gradients that may be spilled; None reserves no space for them.
        format: the format of its state, with the tensors that `state_tensors` describes.
            None: the tensors are what their names say; a record with the tensors of a compact one is compact.
        first_element: if the record has rows of a parameter, the number of its first element there; None: it is whole.
    """

    name: str
    values: torch.Tensor
    state: Mapping[str, torch.Tensor]
    unit: str = "all"
    buffer: bool = False
    order: tuple[int, ...] | None = None
    spill: torch.dtype | None = None
    format: str | None = None
    first_element: int | None = None


@dataclass(frozen=True)
class Sizes:
    """The sizes of a store, in bytes."""

    total_bytes: int  # the whole store on storage
    slot_bytes: int  # one slot of all values and state
    index_bytes: int  # memory of an open store that grows with the state
    buffer_bytes: int  # memory of an open store that does not depend on its contents
    chunk_bytes: int  # memory of one staging chunk of an `Engine`
    other_bytes: int  # memory of an `Engine` for state of other shapes than its records'
    unit_bytes: dict[str, int]  # the values of each unit, as `Store.fetch` returns them
    # Values and state of each record, the memory that `Store.hold` needs for it.
    record_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)


def sizes(
    records: Sequence[Record],
    *,
    optimizer: str = "AdamW",
    chunk_elements: int | None = None,
    devices: int = 1,
) -> Sizes:
    """The sizes of a store that `Store.create` would make. Tensors may be on the meta device; nothing is written.

    Raises:
        ConfigError: they cannot be stored; the message says why.
    """
    units, described = description(records)
    chunk = chunk_elements_of(records) if chunk_elements is None else chunk_elements
    found = _core.store_sizes(described, units, optimizer, chunk, devices)
    *_, of_units, of_records = found
    record_bytes = {record.name: nbytes for record, nbytes in zip(records, of_records, strict=True)}
    # In the order of the fields.
    return Sizes(*found[:-2], dict(zip(units, of_units, strict=True)), record_bytes)


def log_bytes(records: Sequence[Record]) -> Callable[[Sequence[str], int], int]:
    """A function that returns the bytes of a gradient log, for the names of some records and a number of steps."""
    units, described = description(records)
    chunk = chunk_elements_of(records)
    numbers = {record.name: number for number, record in enumerate(records)}

    def taken(names: Sequence[str], steps: int) -> int:
        return _core.store_log_bytes(described, units, chunk, [numbers[name] for name in names], steps)

    return taken


def places_bytes(records: Sequence[Record], deferred: Collection[str]) -> int:
    """The bytes behind a store for second places of gradients, where updates of `deferred` wait for the next step."""
    units, described = description(records)
    numbers = [number for number, record in enumerate(records) if record.name in deferred]
    return _core.store_places_bytes(described, units, chunk_elements_of(records), numbers)


def chunk_elements_of(records: Sequence[Record]) -> int:
    """The default elements of a chunk: as many as have their state in one request, at most 98,304."""
    widths = [
        sum(tensor.element_size() for tensor in record.state.values() if tensor.shape == record.values.shape)
        for record in records
    ]

    def fitting(grain: int) -> int:
        return max(grain, min(_REQUEST_BYTES // max([1, *widths]) // grain * grain, CHUNK_ELEMENTS))

    # A chunk that is not the last must end with a page. Otherwise the finer grain stays: a store is resumed with the
    # chunks that it was made with.
    chunk = fitting(_CHUNK_GRAIN)
    ends_inside_a_page = any(
        record.values.numel() > chunk and chunk * size % PAGE_BYTES
        for record in records
        for size in (record.values.element_size(), *([record.spill.itemsize] if record.spill is not None else []))
    )
    return fitting(PAGE_BYTES) if ends_inside_a_page else chunk


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


def adam_state(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The initial state of Adam: a float32 master if `values` has 16 bits, and two moments of zeros."""
    import torch

    zeros = {name: torch.zeros_like(values, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    return zeros if values.dtype == torch.float32 else {"master": values.float(), **zeros}


def description(records: Sequence[Record]) -> tuple[list[str], list[Described]]:
    """The names of the units, and the records, as the extension takes them."""
    numbers: dict[str, int] = {}
    described: list[Described] = []
    for record in records:
        order = list(record.order or ())
        # Row-major order is left out, so that equal tensors have equal descriptions.
        order = [] if order == list(range(record.values.dim())) else order
        spill = None if record.spill is None else str(record.spill).removeprefix("torch.")
        state = [_described(name, tensor) for name, tensor in record.state.items()]
        unit = numbers.setdefault(record.unit, len(numbers))
        values = _described(record.name, record.values)
        described.append((record.buffer, unit, values, state, order, spill, record.format, record.first_element))
    return list(numbers), described


def _described(name: str, tensor: torch.Tensor) -> tuple[str, str, list[int]]:
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def room_for(record: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Tensors for a record's values and state, in the order of dimensions in which they are stored."""
    import torch

    from memascend.tensors import strides_of

    def empty(dtype: str, shape: list[int]) -> torch.Tensor:
        strides = strides_of(shape, stored_order(record, shape))
        return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="cpu")

    return empty(record["dtype"], record["shape"]), {of: empty(dtype, shape) for of, dtype, shape in record["state"]}


class Part(NamedTuple):
    """A part of a tensor of a record, in the order in which it is stored."""

    of: str  # the state tensor's name; "" is the values
    start: int  # its first element
    values: torch.Tensor  # the elements
