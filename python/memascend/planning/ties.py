"""Finds where tied parameters are used again, and which units are bound around each use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from memascend.planning.module_tree import ModuleTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.planning.module_tree import UnitDraft


def note_ties(tree: ModuleTree, pieces: Sequence[UnitDraft]) -> None:
    """Where tied parameters are used again, and what is bound around each use.

    A tied parameter is used after the unit whose parameters are registered before that place.
    """
    first = {id(parameter): name for name, parameter in tree.parameters.items()}
    unit_of = {name: piece for piece in pieces for name in piece.parameters}
    around = _Around(tree, pieces, {id(tree.parameters[name]): piece for name, piece in unit_of.items()})
    before: UnitDraft | None = None
    for name, parameter in tree.model.named_parameters(remove_duplicate=False):
        here = unit_of[first[id(parameter)]]
        again = here.around
        if name in unit_of:
            before = here if not here.pinned else before
        elif before is not None and before is not here and not here.pinned:
            again = here.around_again
            if before.name not in here.again:
                here.again.append(before.name)
        again.update((other.name, None) for other in around.of(name) if other is not here and not other.pinned)


class _Around:
    """Which units modules bind for as long as their call takes; see `wiring`, which makes the gates that do."""

    def __init__(self, tree: ModuleTree, pieces: Sequence[UnitDraft], unit_of: dict[int, UnitDraft]) -> None:
        # A module that has several names is one, by whichever it is called.
        self._modules = dict(tree.model.named_modules(remove_duplicate=False))
        self._bound: dict[int, list[UnitDraft]] = {}
        for piece in pieces:
            if piece.module is not None:
                self._bound.setdefault(id(tree.modules[piece.module]), []).append(piece)
        for name, parameter in tree.model.named_parameters(remove_duplicate=False):
            owner = tree.owner(name)
            # A list of parameters is never called: who holds it binds them.
            while owner and isinstance(self._modules[owner], (nn.ParameterList, nn.ParameterDict)):
                owner = tree.owner(owner)
            self._bound.setdefault(id(self._modules[owner]), []).append(unit_of[id(parameter)])
        # Of each module, with those around it.
        self._found: dict[str, tuple[UnitDraft, ...]] = {}

    def of(self, parameter: str) -> tuple[UnitDraft, ...]:
        """The units that are bound while the module that owns a parameter computes."""
        return self._within(ModuleTree.owner(parameter))

    def _within(self, module: str) -> tuple[UnitDraft, ...]:
        found = self._found.get(module)
        if found is None:
            outer = self._within(ModuleTree.owner(module)) if module else ()
            found = self._found[module] = tuple(
                dict.fromkeys((*outer, *self._bound.get(id(self._modules[module]), ())))
            )
        return found
