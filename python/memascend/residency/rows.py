"""Looks up rows of an embedding on storage: reads and checks only the pieces that hold them."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memascend.engine import CHUNK_ELEMENTS
from memascend.residency.row_gradient import RowGradient, Term

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.engine import UnitParts
    from memascend.residency.placeholder import Place

# A user's default device may be another.
_CPU = torch.device("cpu")
# {bytes: count}. A piece of values each, and enough of them at once to keep a disk busy.
CHUNKS = {CHUNK_ELEMENTS * 4: 8}
# Of a gradient: what is made, what it is gathered from, and a second look-up's.
_WINDOWS = 3
# Positions whose rows are copied at once.
_GATHERED = 512
# Where torch's own gradient hooks and ours stand.
_OURS = {"memascend"}


def window_bytes(row_bytes: int) -> int:
    """Memory in which an embedding's gradient is made for the engine, a chunk of its update after the other."""
    return _WINDOWS * (CHUNK_ELEMENTS * 4 + 2 * row_bytes)


class Rows:
    """Reads embeddings through a few chunks of host memory, whatever their size."""

    def __init__(self, parts_of: Callable[[str, int], UnitParts], chunks: Sequence[torch.Tensor]) -> None:
        """`parts_of` gives the parts of a unit by its name, of at most so many bytes; `chunks` are of equal size."""
        self._parts_of = parts_of
        self._chunks = list(chunks)
        # One look-up at a time has the chunks.
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of the chunks."""
        with self._lock:
            self._chunks.clear()

    def look_up(
        self,
        unit: str,
        place: Place,
        indices: torch.Tensor,
        padding: int | None,
        instead: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """What `torch.nn.functional.embedding` gives; None where that takes torch itself, with all of the weight.

        `instead` has the rows where those on storage are not the ones that count.

        Raises:
            IndexError: there is no such row, as torch says it.
            StorageError: as in `Store.fetch`.
        """
        if type(indices) is not torch.Tensor or indices.dtype not in (torch.int64, torch.int32):
            return None
        if indices.device.type != "cpu" or indices.layout != torch.strided:
            return None
        count = place.shape[0]
        if padding is None:
            padding = -1
        elif not -count <= padding < count:
            return None
        elif padding < 0:
            padding += count
        found: torch.Tensor = _LookUp.apply(place.parameter, indices, padding, _Table(self, unit, place, instead))
        return found

    def each_part(
        self,
        unit: str,
        visit: Callable[[int, torch.Tensor], None],
        chosen: Callable[[list[tuple[int, int]]], list[int]] | None = None,
    ) -> None:
        """Call `visit` with parts of a unit, all of one commit and in order: where each begins, and its bytes.

        They are valid during the call. `chosen` says which, of the places of all.
        """
        with self._lock:
            parts = self._parts_of(unit, self._chunks[0].nbytes)
            places = parts.places()
            wanted = deque(range(len(places)) if chosen is None else chosen(places))
            free = deque(self._chunks)
            reads: deque[tuple[int, torch.Tensor, Any]] = deque()
            read: Any = None
            try:
                while wanted or reads:
                    while wanted and free:
                        index = wanted.popleft()
                        memory = free.popleft()
                        reads.append((index, memory, parts.begin(index, memory[: places[index][1]])))
                    index, memory, read = reads.popleft()
                    read.wait()
                    visit(places[index][0], memory[: places[index][1]])
                    free.append(memory)
            finally:
                # Dropping a read waits for the device: its chunk is the next look-up's. The traceback of an error must
                # not hold the slots, which a later step writes to.
                read = parts = None  # type: ignore[assignment]
                reads.clear()

    def gathered(self, unit: str, place: Place, indices: torch.Tensor) -> torch.Tensor:
        """The rows that are named, in their order."""
        count, width = place.shape
        result = torch.empty((*indices.shape, width), dtype=place.dtype, device=_CPU)
        if indices.numel() == 0:
            return result
        named, order = torch.sort(indices.detach().reshape(-1).long(), stable=True)
        if int(named[0]) < 0 or int(named[-1]) >= count:
            raise IndexError("index out of range in self")
        flat = result.view(-1, width)
        row_bytes = width * flat.element_size()

        def chosen(places: list[tuple[int, int]]) -> list[int]:
            bounds = torch.tensor(places, device=_CPU)
            first, end = bounds[:, 0] // row_bytes, (bounds[:, 0] + bounds[:, 1] + row_bytes - 1) // row_bytes
            low, high = torch.searchsorted(named, first), torch.searchsorted(named, end)
            wanted: list[int] = torch.nonzero(high > low).flatten().tolist()
            return wanted

        def visit(start: int, part: torch.Tensor) -> None:
            end = start + part.nbytes
            # Rows that are whole in here, and those of which a part is.
            first, last = -(-start // row_bytes), end // row_bytes
            if first < last:
                bounds = torch.tensor([first, last], device=_CPU)
                low, high = torch.searchsorted(named, bounds).tolist()
                rows = part[first * row_bytes - start : last * row_bytes - start].view(place.dtype).view(-1, width)
                for at in range(low, high, _GATHERED):
                    here = slice(at, min(at + _GATHERED, high))
                    flat.index_copy_(0, order[here], rows.index_select(0, named[here] - first))
            # At its beginning and at its end, which may be of one row.
            for row in {bound // row_bytes for bound in (start, end) if bound % row_bytes}:
                begin, stop = max(start, row * row_bytes), min(end, (row + 1) * row_bytes)
                low, high = torch.searchsorted(named, torch.tensor([row, row + 1], device=_CPU)).tolist()
                if low < high:
                    columns = slice(begin - row * row_bytes, stop - row * row_bytes)
                    flat.view(torch.uint8)[order[low:high], columns] = part[begin - start : stop - start]

        with torch.no_grad():
            self.each_part(unit, visit, chosen)
        return result


class _Table(NamedTuple):
    """An embedding, and where its rows are."""

    rows: Rows
    unit: str
    place: Place
    instead: torch.Tensor | None

    def gathered(self, indices: torch.Tensor) -> torch.Tensor:
        """The rows that are named, in their order."""
        if self.instead is not None:
            with torch.no_grad():
                return torch.nn.functional.embedding(indices, self.instead)
        return self.rows.gathered(self.unit, self.place, indices)


class _LookUp(torch.autograd.Function):
    """A look-up whose gradient is of the rows that it named."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, indices: torch.Tensor, padding: int, table: _Table) -> torch.Tensor:
        del weight
        ctx.save_for_backward(indices)
        ctx.padding, ctx.place = padding, table.place
        return table.gathered(indices)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        place: Place = ctx.place
        nothing = (None,) * 3
        if not _goes_to_engine(ctx, place):
            dense = torch.ops.aten.embedding_dense_backward(gradient, indices, place.shape[0], ctx.padding, False)
            return dense, *nothing
        return RowGradient((Term.of(gradient, indices, ctx.padding),), place.shape, place.dtype), *nothing


def _goes_to_engine(ctx: Any, place: Place) -> bool:
    """Whether nobody but us looks at the gradient before it is handed on."""
    if torch.is_grad_enabled() or _flushes_denormals():
        return False
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        parameter: Any = place.parameter
        hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001
        if parameter._backward_hooks or hooks is None or set(hooks) != _OURS:  # noqa: SLF001
            return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[0][0]))  # noqa: SLF001
    except RuntimeError:
        # torch.autograd.grad() asks for it.
        return False


def _flushes_denormals() -> bool:
    """Whether this thread computes with another arithmetic than the engine's (`torch.set_flush_denormal`)."""
    return not bool(torch.full((), 2.0**-140, device="cpu").mul_(0.5))
