"""Groups the parameters that FSDP2 gathers together into units."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.pages import whole_pages
from memascend.planning.units import Unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch


def units_of_gathers(
    gathers: Iterable[tuple[str, Iterable[str]]], named: Mapping[str, torch.nn.Parameter]
) -> tuple[Unit, ...]:
    """The units of one rank.

    Args:
        gathers: names, and the names of the parameters that are gathered together.
        named: this rank's rows, of those that it has some of.
    """
    units: list[Unit] = []
    taken: set[str] = set()
    for given, parameters in gathers:
        names = [each for each in parameters if each in named]
        if not names:
            continue
        name = given
        while name in taken:
            name += "'"
        taken.add(name)
        sizes = {each: whole_pages(named[each].nbytes) for each in names}
        units.append(
            Unit(
                name=name,
                parameters=tuple(names),
                nbytes=sum(sizes.values()),
                module=None,
                pinned=False,
                frozen_bytes=sum(sizes[each] for each in names if not named[each].requires_grad),
                elements=sum(named[each].numel() for each in names),
            )
        )
    return tuple(units)
