"""Finds gradients that are not finite, and computes the norm of all gradients of a step, on the CPU or on a device."""

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


# A pair, for one gradient or for several: whether a value is not finite, and the squared norm.
Numbers = tuple[bool, Squares]
# The measure of a gradient: `Numbers`, or tensors that may still be on a device. The tensors are a row of sums or, for
# dtypes without kernels, a pair.
Measure = Numbers | torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# The dtypes that the kernels support.
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
# Once the waiting gradients have this many bytes, one kernel launch measures them. Some of these gradients are copies,
# which use additional memory.
_BUCKET_BYTES = 64 << 20
# The number of rows of sums that are allocated and zeroed at once.
_ROWS = 64


class Norms:
    """Computes the norm of all gradients of a step, and finds gradients that are not finite."""

    def __init__(self, *, counts: bool = True) -> None:
        """`counts`: this rank's squares count in the norm. If there are several replicas, only one replica counts."""
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
        """Measures an arriving gradient; does not wait for a device."""
        values = _dense(gradient)
        if not _is_counted(values):
            return self._measured_here(values)
        row = self._row(values.device)
        kernels.begin_check([values], row)
        return row[0]

    def measure_once(self, gradient: Gradient, values: torch.Tensor) -> None:
        """Measures `values`, a gradient in memory, unless this step has already measured the gradient.

        Gradients on a device are measured together later, so no code may write to them before the norm is computed.
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
        """Returns all measures as numbers; waits for the device once for all rows of sums, and for each pair."""
        rows = [index for index, measure in enumerate(measures) if isinstance(measure, torch.Tensor)]
        found: dict[int, Numbers] = {}
        if rows:
            stacked = torch.stack([cast("torch.Tensor", measures[index]) for index in rows])
            found.update(zip(rows, kernels.found_in(stacked), strict=True))
        # The other measures are numbers already, or, for dtypes without kernels, pairs of tensors.
        return [found.get(index) or _numbers(measure) for index, measure in enumerate(measures)]

    def of(self, gradients: Iterable[tuple[Gradient, torch.Tensor]]) -> Numbers:
        """Returns whether any of these gradients is not finite, and the sum of their squares if `counts`, else 0.

        Exact sums are rounded once, over all ranks, so neither order, device nor number of ranks changes the norm. A
        gradient is not read again if it was measured when it arrived, when it was stored or when it was used. Scalar
        arithmetic on a stored gradient, such as clipping, counts as a factor.
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
    """Returns this rank's summands for three sums over all ranks.

    The first summand says whether a value is not finite. The second summand says whether the squares are rounded. The
    third summand is the exact sum of squares. Each row of a parameter counts on only one rank.
    """
    bad, squares = own
    return [bad, 0, squares] if isinstance(squares, int) else [bad, 1, 0]


def of_all_ranks(own: Numbers, sums: Sequence[int], exchange: Exchange) -> Numbers:
    """Returns the `Numbers` of all ranks together; `sums` has the sums of `summands()` over all ranks. Collective."""
    bad, were_rounded, squares = sums
    # `exchange.all_gather()` returns the squares in the order of ranks.
    return bool(bad), total(exchange.all_gather("rounded squares", own[1])) if were_rounded else squares


def norm_of(squares: Squares) -> float:
    """Returns the norm for a sum of squares, in double precision."""
    return math.sqrt(rounded(squares))


def _is_counted(values: torch.Tensor) -> bool:
    """True if `values` are on a device other than the CPU, and have a dtype that the kernels support."""
    return values.device.type != "cpu" and values.dtype in _FLOATS


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a gradient as a one-dimensional tensor, in the order of memory."""
    values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not torch.ops.aten.is_non_overlapping_and_dense(values):
        values = values.contiguous()
    # The measure does not depend on the order of dimensions, and the kernel supports only few dimensions.
    return values.view(-1) if values.is_contiguous() else flat(values)


def _numbers(measure: Measure) -> Numbers:
    bad, squared = cast("tuple[torch.Tensor, torch.Tensor] | Numbers", measure)
    return bool(bad), float(squared) if isinstance(squared, torch.Tensor) else squared
