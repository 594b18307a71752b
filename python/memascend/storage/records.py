"""Describes the records of a store, and checks tensors for the Rust extension against these descriptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from memascend import _core
from memascend.errors import ConfigError
from memascend.memory import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    # The descriptions that the extension's constructors accept. A tensor is (name, dtype, shape); a record is (True for
    # a buffer, index of the record's unit, values, state, order, spill dtype, format, first element).
    Tensor = tuple[str, str, list[int]]
    Described = tuple[bool, int, Tensor, list[Tensor], list[int], str | None, str | None, int | None]


class Lent(NamedTuple):
    """A gradient that the extension cannot read itself, and functions that copy it to host memory and wait for it."""

    tensor: torch.Tensor  # the gradient, on any device; its strides follow the record's order, without gaps
    # The engine's thread calls `window` with (first byte, number of bytes). `window` returns (address, first byte,
    # number of bytes) of a range in host memory that contains the requested range; the address is a multiple of 8. The
    # range keeps its bytes until the engine calls `window` again, for this or another gradient.
    window: Callable[[int, int], tuple[int, int, int]]
    order: Callable[[], None]  # makes later work of the calling thread wait until the device has computed the gradient


def place_of(tensor: torch.Tensor) -> tuple[int, int, object]:
    """Returns a tensor's address, its number of bytes, and the storage object that keeps the memory alive."""
    return tensor.data_ptr(), tensor.nbytes, tensor.untyped_storage()


def stored_order(record: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the stored order of dimensions of a record's tensor; `shape` is the shape of the tensor.

    A tensor of the record's own shape has the record's order; any other tensor is row-major (None).
    """
    return record["order"] if list(shape) == record["shape"] else None


def require(name: str, tensor: torch.Tensor, dtype: str, shape: list[int], order: Sequence[int] | None) -> None:
    """Rejects a tensor that is not on the CPU, or does not have this dtype, shape and order of dimensions."""
    if tensor.device.type != "cpu":
        raise ConfigError(f"the tensors of {name!r} must be on the CPU, not on {tensor.device}: pass tensor.cpu()")
    if order is None and not tensor.is_contiguous():
        raise ConfigError(f"the tensors of {name!r} must be contiguous: pass tensor.contiguous()")
    if order is not None and not (len(order) == tensor.dim() and tensor.permute(tuple(order)).is_contiguous()):
        raise ConfigError(
            f"the strides of the tensors of {name!r} must decrease in the order of dimensions {list(order)}, without "
            "gaps: pass copies with such strides"
        )
    got = str(tensor.dtype).removeprefix("torch.")
    if got != dtype or list(tensor.shape) != shape:
        raise ConfigError(
            f"a tensor of {name!r} is {got} of shape {list(tensor.shape)}, but must be {dtype} of shape {shape}"
        )


# The largest number of bytes of a chunk's state. One I/O request moves this number of bytes; slightly more bytes would
# need a second, small request. Disks are slower with small requests.
_REQUEST_BYTES = 1 << 20
# The largest number of elements of a chunk. With chunks of this size, the twelve staging chunks that an engine has by
# default take at most 16 MiB if gradients are 16-bit.
CHUNK_ELEMENTS = 98_304
# The number of elements of a chunk is a multiple of this number.
_CHUNK_GRAIN = 2_048


@dataclass(frozen=True, kw_only=True)
class Record:
    """The description of a parameter or a persistent buffer in a store.

    Attributes:
        name: a name that no other record of the store has.
        values: a tensor with the dtype and shape of the values; it may be on the meta device.
        state: state tensors by name; they may be on the meta device.
        unit: the name of the unit that the record belongs to; records of one unit are adjacent in the list of records.
        buffer: True for a persistent buffer, False for a parameter.
        order: the dimensions from the largest stride to the smallest, as `order_of` returns them; None: row-major.
            Values, gradients and state of the record's shape are stored in this order, other state in row-major order.
        spill: the dtype of gradients that may be spilled; None reserves no space for them.
        format: the format of the state; `state` then has the tensors that `state_tensors` describes. None: the store
            takes each tensor as it is, and detects from `state` whether the format is the compact one.
        first_element: for a shard (rows of a parameter), the index of its first element in the whole parameter; None:
            the record has the whole parameter.
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

    total_bytes: int  # disk space of the whole store, without a gradient log
    slot_bytes: int  # disk space of one of the two slots, for all values and state
    index_bytes: int  # host memory of an open store for the index, which grows with the state
    buffer_bytes: int  # host memory of an open store that does not grow with the state: catalog buffers, JSON values
    chunk_bytes: int  # host memory of one staging chunk of an `Engine`
    other_bytes: int  # host memory of an `Engine` for state tensors that are not cut into chunks
    unit_bytes: dict[str, int]  # bytes of the values of each unit, as `Engine.fetch` reads them
    # (bytes of values, bytes of state) of each record: `Store.hold` needs that much memory to keep the record in RAM.
    record_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)


def sizes(
    records: Sequence[Record],
    *,
    optimizer: str = "AdamW",
    chunk_elements: int | None = None,
    devices: int = 1,
) -> Sizes:
    """Computes the sizes of a store that `Store.create` would make; writes nothing.

    Raises:
        ConfigError: the records cannot be stored; the message gives the reason.
    """
    units, described = description(records)
    chunk = chunk_elements_of(records) if chunk_elements is None else chunk_elements
    found = _core.store_sizes(described, units, optimizer, chunk, devices)
    *_, of_units, of_records = found
    record_bytes = {record.name: nbytes for record, nbytes in zip(records, of_records, strict=True)}
    # `store_sizes` returns the sizes in the order of the fields of `Sizes`.
    return Sizes(*found[:-2], dict(zip(units, of_units, strict=True)), record_bytes)


def log_bytes(records: Sequence[Record]) -> Callable[[Sequence[str], int], int]:
    """Returns a function of (names of records, steps) that returns the bytes of a gradient log of these records."""
    units, described = description(records)
    chunk = chunk_elements_of(records)
    numbers = {record.name: number for number, record in enumerate(records)}

    def taken(names: Sequence[str], steps: int) -> int:
        return _core.store_log_bytes(described, units, chunk, [numbers[name] for name in names], steps)

    return taken


def places_bytes(records: Sequence[Record], deferred: Collection[str]) -> int:
    """Returns the bytes by which a store grows so that updates of the records in `deferred` may be deferred.

    Each record that may spill gets a second place for its gradient, and the store gets a small gradient log.
    """
    units, described = description(records)
    numbers = [number for number, record in enumerate(records) if record.name in deferred]
    return _core.store_places_bytes(described, units, chunk_elements_of(records), numbers)


def chunk_elements_of(records: Sequence[Record]) -> int:
    """Returns the default number of elements of a chunk.

    It is the largest multiple of `_CHUNK_GRAIN` (for some records, of `PAGE_BYTES`) whose state fits one I/O request,
    and at most `CHUNK_ELEMENTS`.
    """
    widths = [
        sum(tensor.element_size() for tensor in record.state.values() if tensor.shape == record.values.shape)
        for record in records
    ]

    def fitting(grain: int) -> int:
        return max(grain, min(_REQUEST_BYTES // max([1, *widths]) // grain * grain, CHUNK_ELEMENTS))

    # Each chunk except the last must end at a page boundary. Use `PAGE_BYTES` as the grain only if a record needs it: a
    # resume computes the chunk size again, and must get the chunk size of the existing store.
    chunk = fitting(_CHUNK_GRAIN)
    ends_inside_a_page = any(
        record.values.numel() > chunk and chunk * size % PAGE_BYTES
        for record in records
        for size in (record.values.element_size(), *([record.spill.itemsize] if record.spill is not None else []))
    )
    return fitting(PAGE_BYTES) if ends_inside_a_page else chunk


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Returns a tensor's dimensions from the largest stride to the smallest; None if the tensor is row-major.

    Raises:
        ConfigError: the tensor has gaps or overlaps itself.
    """
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if not tensor.permute(order).is_contiguous():
        raise ConfigError("the tensor has gaps or overlaps itself: pass tensor.contiguous()")
    return order


def adam_state(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns Adam's initial state: two moments of zeros, and a float32 master unless `values` is float32."""
    import torch

    zeros = {name: torch.zeros_like(values, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    return zeros if values.dtype == torch.float32 else {"master": values.float(), **zeros}


def description(records: Sequence[Record]) -> tuple[list[str], list[Described]]:
    """Returns the names of the units, and the records as tuples for the extension."""
    numbers: dict[str, int] = {}
    described: list[Described] = []
    for record in records:
        order = list(record.order or ())
        # An explicit row-major order gets the same description as None, so that equal tensors have equal descriptions.
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
    """Allocates CPU tensors for a record's values and state, with the strides in which they are stored."""
    import torch

    from memascend.tensors import strides_of

    def empty(dtype: str, shape: list[int]) -> torch.Tensor:
        strides = strides_of(shape, stored_order(record, shape))
        return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="cpu")

    return empty(record["dtype"], record["shape"]), {of: empty(dtype, shape) for of, dtype, shape in record["state"]}


class Part(NamedTuple):
    """A range of elements of one tensor of a record, in stored order."""

    of: str  # name of the state tensor; "" for the values
    start: int  # index of the first element in that tensor
    values: torch.Tensor  # the elements, one-dimensional
