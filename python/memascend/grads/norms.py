"""Measures gradients, once each, and takes the norm of all of a step: exact sums, on the host as on a device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch

from memascend import kernels
from memascend.tensors import Squares, flat, rounded, total

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memascend.distributed.control_plane import Exchange
    from memascend.grads.gradient import Gradient


# Whether a gradient has a value that is not finite, and its squared norm.
Numbers = tuple[bool, Squares]
# The same as it was measured: numbers; on a device a row of sums, or, of dtypes without kernels, two tensors.
Measure = Numbers | torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# The dtypes that the kernels have.
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
# Gradients that wait to be measured by one launch: their copies take so much memory at most.
_BUCKET_BYTES = 64 << 20
# Rows that are made, and zeroed, at once.
_ROWS = 64


class Norms:
    """The norm of all gradients of a step, from a measure that was taken once of each."""

    def __init__(self, *, counts: bool = True) -> None:
        """`counts`: whether this rank's squares count; where there are replicas, those of one do."""
        self._counts = counts
        # Of gradients that were measured in memory for this step, by name.
        self._measures: dict[str, Measure] = {}
        # Gradients on a device that are not measured yet.
        self._bucket: dict[str, torch.Tensor] = {}
        # Rows for gradients that arrive, by the device and the stream that zeroes them and adds to them.
        self._rows: dict[object, list[torch.Tensor]] = {}

    def begin_step(self) -> None:
        """Forget what the step before has measured."""
        self._measures.clear()
        self._bucket.clear()
        self._rows.clear()

    def measure(self, gradient: torch.Tensor) -> Measure:
        """Begin to measure a gradient that arrives; where it lies on a device, by one launch."""
        values = _dense(gradient)
        if not _is_counted(values):
            return self._measured_here(values)
        row = self._row(values.device)
        kernels.begin_check([values], row)
        return row[0]

    def measure_once(self, gradient: Gradient, values: torch.Tensor) -> None:
        """Take the measure that this gradient has for this step, of its values in memory.

        Gradients on a device are measured together: they must not be written to before the norm is computed.
        """
        if gradient.name in self._measures or gradient.name in self._bucket:
            return
        values = _dense(values)
        if not _is_counted(values):
            self._measures[gradient.name] = self._measured_here(values)
            return
        self._bucket[gradient.name] = values
        if sum(waiting.nbytes for waiting in self._bucket.values()) >= _BUCKET_BYTES:
            self._measure_bucket()

    def _measure_bucket(self) -> None:
        if self._bucket:
            waiting = list(self._bucket.values())
            sums = kernels.new_sums(len(waiting), waiting[0].device)
            kernels.begin_check(waiting, sums)
            self._measures.update(zip(self._bucket, sums.unbind(), strict=True))
            self._bucket.clear()

    def _row(self, device: torch.device) -> torch.Tensor:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        rows = self._rows.setdefault((device, stream), [])
        if not rows:
            rows += kernels.new_sums(_ROWS, device).split(1)
        return rows.pop()

    def _measured_here(self, values: torch.Tensor) -> Measure:
        """Of values in host memory, and of dtypes that the kernels do not have."""
        if values.dtype in _FLOATS:
            return kernels.checked(values)
        found = ~torch.isfinite(values).all()
        squared = values.double().square().sum()
        return (bool(found), float(squared)) if values.device.type == "cpu" else (found, squared)

    def read(self, measures: Sequence[Measure]) -> list[Numbers]:
        """All of them as numbers; waits for the device once where it has any."""
        rows = [index for index, measure in enumerate(measures) if isinstance(measure, torch.Tensor)]
        found: dict[int, Numbers] = {}
        if rows:
            stacked = torch.stack([cast("torch.Tensor", measures[index]) for index in rows])
            found.update(zip(rows, kernels.found_in(stacked), strict=True))
        # Of dtypes that the kernels do not have, all others are numbers already.
        return [found.get(index) or _numbers(measure) for index, measure in enumerate(measures)]

    def of(self, gradients: Iterable[tuple[Gradient, torch.Tensor]]) -> Numbers:
        """Whether any of these is not finite, and the sum of their squares.

        The sum of all ranks is rounded once: neither order, nor device, nor the number of ranks changes the norm.
        Nothing is read for it that was measured as it was handed on, written or used. What was done by scalars to one
        on storage, as clipping does, counts as a factor.
        """
        numbers = self.each([one for one, _ in gradients])
        # In the order of the parameters, whichever gradient came first.
        squares = total(squared for _, squared in numbers)
        return any(bad for bad, _ in numbers), squares if self._counts else 0

    def each(self, gradients: Iterable[Gradient]) -> list[Numbers]:
        """The same of each gradient by itself."""
        self._measure_bucket()
        known = self._measures
        return self.read([known[one.name] if one.name in known else one.measure() for one in gradients])


def summands(own: Numbers) -> list[int]:
    """What a rank adds to the sums over all ranks: its rows are no other's."""
    bad, squares = own
    return [bad, 0, squares] if isinstance(squares, int) else [bad, 1, 0]


def of_all_ranks(own: Numbers, sums: Sequence[int], exchange: Exchange) -> Numbers:
    """The numbers of all ranks, from the sums of their `summands`; all ranks make this call together."""
    bad, were_rounded, squares = sums
    # They are added in the order of ranks.
    return bool(bad), total(exchange.tell("rounded squares", own[1])) if were_rounded else squares


def norm_of(squares: Squares) -> float:
    """The norm with these squares, in double precision."""
    return math.sqrt(rounded(squares))


def _is_counted(values: torch.Tensor) -> bool:
    """Whether a kernel counts them on their device."""
    return values.device.type != "cpu" and values.dtype in _FLOATS


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """The elements of a gradient in whatever order they lie."""
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not torch.ops.aten.is_non_overlapping_and_dense(values):
        values = values.contiguous()
    # Neither the flag nor the norm knows an order of dimensions, and the kernel takes few of them.
    return values.view(-1) if values.is_contiguous() else flat(values)


def _numbers(measure: Measure) -> Numbers:
    bad, squared = cast("tuple[torch.Tensor, torch.Tensor] | Numbers", measure)
    return bool(bad), float(squared) if isinstance(squared, torch.Tensor) else squared
