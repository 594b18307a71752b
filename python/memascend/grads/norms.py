"""Measures each gradient once, and computes the norm of a step from exact sums, on the CPU or on a device."""

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


# Whether a gradient has a value that is not finite; its squared norm.
Numbers = tuple[bool, Squares]
# A measure that may still be on a device: `Numbers`, a row of sums, or, for dtypes without kernels, two tensors.
Measure = Numbers | torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# The dtypes that the kernels support.
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
# The maximum size of the gradients that wait to be measured by one launch: some of them are copies, which take memory.
_BUCKET_BYTES = 64 << 20
# The number of rows that are allocated and zeroed at once.
_ROWS = 64


class Norms:
    """Computes the norm of all gradients of a step; measures each gradient once."""

    def __init__(self, *, counts: bool = True) -> None:
        """`counts`: whether this rank's squares enter the norm; among replicas, only one replica's do."""
        self._counts = counts
        # By parameter name: the measures of gradients that were measured in memory for this step.
        self._measures: dict[str, Measure] = {}
        # By parameter name: gradients on a device that are not measured yet.
        self._bucket: dict[str, torch.Tensor] = {}
        # Zeroed rows for arriving gradients, by device and by the stream that zeroes the rows and adds to them.
        self._rows: dict[object, list[torch.Tensor]] = {}

    def begin_step(self) -> None:
        """Forgets the measures of the previous step."""
        self._measures.clear()
        self._bucket.clear()
        self._rows.clear()

    def measure(self, gradient: torch.Tensor) -> Measure:
        """Measures an arriving gradient; on a device, launches one kernel and does not wait for it."""
        values = _dense(gradient)
        if not _is_counted(values):
            return self._measured_here(values)
        row = self._row(values.device)
        kernels.begin_check([values], row)
        return row[0]

    def measure_once(self, gradient: Gradient, values: torch.Tensor) -> None:
        """Measures the values of this gradient in memory, unless the step has its measure already.

        Gradients on a device are measured together later: they must not be written to before the norm is computed.
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
        """Measures values in host memory, and values of dtypes that the kernels do not support."""
        if values.dtype in _FLOATS:
            return kernels.checked(values)
        found = ~torch.isfinite(values).all()
        squared = values.double().square().sum()
        return (bool(found), float(squared)) if values.device.type == "cpu" else (found, squared)

    def read(self, measures: Sequence[Measure]) -> list[Numbers]:
        """Returns all measures as numbers; waits for the device once if a measure is still on it."""
        rows = [index for index, measure in enumerate(measures) if isinstance(measure, torch.Tensor)]
        found: dict[int, Numbers] = {}
        if rows:
            stacked = torch.stack([cast("torch.Tensor", measures[index]) for index in rows])
            found.update(zip(rows, kernels.found_in(stacked), strict=True))
        # The other measures are numbers already, or, for dtypes without kernels, pairs of tensors.
        return [found.get(index) or _numbers(measure) for index, measure in enumerate(measures)]

    def of(self, gradients: Iterable[tuple[Gradient, torch.Tensor]]) -> Numbers:
        """Returns whether any of these gradients is not finite, and the sum of their squares.

        The sum over all ranks is rounded once, so neither order, device nor number of ranks changes the norm. Gradients
        that were measured as they arrived, were stored or were used are not read again. Scalar arithmetic on a stored
        gradient, such as clipping, counts as a factor.
        """
        numbers = self.each([one for one, _ in gradients])
        # Exact squares may be added in any order. `total()` adds rounded squares in the order of the parameters, not in
        # the order of arrival.
        squares = total(squared for _, squared in numbers)
        return any(bad for bad, _ in numbers), squares if self._counts else 0

    def each(self, gradients: Iterable[Gradient]) -> list[Numbers]:
        """Returns for each gradient whether it is not finite, and its squared norm."""
        self._measure_bucket()
        known = self._measures
        return self.read([known[one.name] if one.name in known else one.measure() for one in gradients])


def summands(own: Numbers) -> list[int]:
    """Returns this rank's summands for the sums over all ranks; each row of a parameter counts on one rank only."""
    bad, squares = own
    return [bad, 0, squares] if isinstance(squares, int) else [bad, 1, 0]


def of_all_ranks(own: Numbers, sums: Sequence[int], exchange: Exchange) -> Numbers:
    """Returns the numbers over all ranks from the sums of their `summands()`; a collective call."""
    bad, were_rounded, squares = sums
    # `exchange.all_gather()` returns the squares in the order of ranks.
    return bool(bad), total(exchange.all_gather("rounded squares", own[1])) if were_rounded else squares


def norm_of(squares: Squares) -> float:
    """Returns the norm for a sum of squares, in double precision."""
    return math.sqrt(rounded(squares))


def _is_counted(values: torch.Tensor) -> bool:
    """True if a kernel measures `values` on their device."""
    return values.device.type != "cpu" and values.dtype in _FLOATS


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a gradient as a one-dimensional tensor, in the order of memory."""
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not torch.ops.aten.is_non_overlapping_and_dense(values):
        values = values.contiguous()
    # Flag and norm do not depend on the order of dimensions, and the kernel supports few dimensions.
    return values.view(-1) if values.is_contiguous() else flat(values)


def _numbers(measure: Measure) -> Numbers:
    bad, squared = cast("tuple[torch.Tensor, torch.Tensor] | Numbers", measure)
    return bool(bad), float(squared) if isinstance(squared, torch.Tensor) else squared
