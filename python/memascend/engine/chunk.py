"""Gives an optimizer's function tensors on the engine's staging memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


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
                name: tensor(lent, dtype, shape)
                for (name, dtype, shape), lent in zip(entry["state"], state, strict=True)
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
