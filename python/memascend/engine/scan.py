"""Shows what a scan of entries reads as tensors, part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from memascend.engine.descriptions import Descriptions


class Part(NamedTuple):
    """A part of a tensor of an entry, in the order in which it is stored.

    Attributes:
        of: the state tensor's name; "" is the values.
        start: its first element.
        values: the elements.
    """

    of: str
    start: int
    values: torch.Tensor


def scan_of(
    descriptions: Descriptions, names: Sequence[str], visit: Callable[[str, list[Part]], object]
) -> tuple[list[int], Callable[[int, list[tuple[int, int, Any]]], None]]:
    """The numbers of entries, and a function that shows what is lent of them to `visit`."""
    import torch

    names_of = {descriptions.index(name): name for name in names}
    tensors = {
        index: [("", entry["dtype"]), *((of, dtype) for of, dtype, _ in entry["state"])]
        for index, entry in ((index, descriptions[index]) for index in names_of)
    }

    def show(index: int, lent: list[tuple[int, int, Any]]) -> None:
        parts = []
        for tensor, first, memory in lent:
            of, dtype = tensors[index][tensor]
            values = torch.frombuffer(memory, dtype=getattr(torch, dtype))
            parts.append(Part(of, first // values.itemsize, values))
        visit(names_of[index], parts)

    return list(names_of), show
