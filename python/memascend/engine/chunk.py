"""Gives an optimizer's function tensors on the engine's staging memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

__all__ = ["Chunk", "adapter"]


@dataclass(kw_only=True, eq=False)
class Chunk:
    """A part of an entry, or all of it; valid during the call alone.

    Attributes:
        values: writable in place. One-dimensional, in the order in which it is stored; of the entry's shape where it is
            whole.
        gradient: alike; None where there is none.
        state: by name, writable in place; alike where it has the entry's shape. Tensors of another shape are given as
            they are, the same memory in every call, and are written after the last.
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

    order = None if entry["order"] is None else tuple(entry["order"])
    flat = gradient
    # A gradient that is made part by part.
    by_rows = None if whole else getattr(gradient, "elements", None)
    if by_rows is not None:
        flat = None
    elif gradient is not None and not whole:
        flat = (gradient if order is None else gradient.permute(order)).reshape(-1)

    def tensor(lent: Any, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        of = getattr(torch, dtype)
        with memoryview(lent) as view:
            empty = view.nbytes == 0
        made = torch.empty(0, dtype=of, device="cpu") if empty else torch.frombuffer(lent, dtype=of)
        if list(shape) != list(entry["shape"]):
            return made.view(shape)
        if not whole:
            return made
        if order is None:
            return made.view(shape)
        return made.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])

    def call(values: Any, spilled: Any, state: Sequence[Any], start: int, count: int, last: bool) -> None:
        part: torch.Tensor | None
        if before is not None:
            before()
        if spilled is not None:
            part = tensor(spilled, entry["spill"], entry["shape"])
        elif by_rows is not None:
            part = by_rows(start, count)
        elif flat is not None and not whole:
            part = flat[start : start + count].cpu()
        else:
            part = None if gradient is None else gradient.cpu()
        chunk = Chunk(
            values=tensor(values, entry["dtype"], entry["shape"]),
            gradient=part,
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
