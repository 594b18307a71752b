"""Records the order in which micro-batches use units, and predicts it for the next call."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memascend.gradients.gradient import Gradient
    from memascend.residency.unit_slot import Home


@dataclass
class Path:
    """The streamed units that one micro-batch used, in order, and at which of them each gradient arrived."""

    units: list[int] = field(default_factory=list)
    # The stage at which each parameter's gradient arrived: the place in `units`, by the parameter's name.
    arrivals: dict[str, int] = field(default_factory=dict)

    def reach(self, homes: Iterable[Home]) -> list[int]:
        """Note that units are used; returns those that begin a stage."""
        begun = []
        for home in homes:
            # A unit that is always in memory is read once, whoever uses it when.
            if home.pinned or home.held or (self.units and self.units[-1] == home.index):
                continue
            self.units.append(home.index)
            begun.append(home.index)
        return begun


class Recorder:
    """Follows micro-batches that are computed one after the other."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        # Parameters whose gradient cannot be summed by layer, with the reason.
        self.unfit: dict[str, str] = {}

    def begin(self) -> None:
        """The next micro-batch begins."""
        self.paths.append(Path())

    def arrive(self, homes: Iterable[Home]) -> None:
        """A module or a backward is about to use units."""
        self.paths[-1].reach(homes)

    def take(self, gradient: Gradient) -> bool:
        """A gradient has arrived, which is left where it is."""
        path, name = self.paths[-1], gradient.name
        values = gradient.place.parameter.grad
        if name in path.arrivals:
            self.unfit.setdefault(name, "arrives in pieces")
        elif values is not None and values.is_sparse:
            self.unfit.setdefault(name, "is sparse")
        path.arrivals[name] = len(path.units) - 1
        return False


class Course:
    """The stages of a micro-batch: the units in the order in which earlier micro-batches used them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Merge the paths of micro-batches, which may skip units, as experts are skipped."""
        self.units: list[int] = []
        alike = Counter(tuple(path.units) for path in paths)
        for units in alike:
            self.units = _merged(self.units, list(units))
        self._stages: dict[int, list[int]] = {}
        for stage, unit in enumerate(self.units):
            self._stages.setdefault(unit, []).append(stage)
        # The last stage at which the gradient of a parameter arrived.
        self.arrivals: dict[str, int] = {}
        for path in paths:
            stages = self._followed(path)
            for name, at in path.arrivals.items():
                stage = stages[at] if at >= 0 else -1
                self.arrivals[name] = max(stage, self.arrivals.get(name, -1))

    def next_stage(self, unit: int, stage: int) -> int | None:
        """The next stage after `stage` that uses a unit; None where no micro-batch has used it from there."""
        stages = self._stages.get(unit, [])
        at = bisect_right(stages, stage)
        return stages[at] if at < len(stages) else None

    def _followed(self, path: Path) -> list[int]:
        stage, found = -1, []
        for unit in path.units:
            following = self.next_stage(unit, stage)
            stage = stage if following is None else following
            found.append(stage)
        return found


def _merged(first: list[int], second: list[int]) -> list[int]:
    """The shortest order that has both, where they agree for the most part."""
    if not first:
        return second
    merged: list[int] = []
    for tag, i, j, k, m in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        merged += first[i:j]
        if tag in ("insert", "replace"):
            merged += second[k:m]
    return merged


class KeptValues:
    """Finds the modules that keep something from one micro-batch for the next: attributes, buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._seen = self._look()

    def changed(self) -> str | None:
        """What changed since the last look, in words; None where nothing did."""
        now = self._look()
        before, self._seen = self._seen, now
        for name, values in now.items():
            for attribute, value in values.items():
                other = before.get(name, {}).get(attribute)
                if other is None or not _same(value, other):
                    return f"module {name!r} changes {attribute!r}" if name else f"the model changes {attribute!r}"
        return None

    def _look(self) -> dict[str, dict[str, tuple[Any, Any]]]:
        found = {}
        for name, module in self._model.named_modules():
            own = {attribute: _mark(value) for attribute, value in vars(module).items() if attribute not in _OF_MODULES}
            own.update((attribute, _mark(value)) for attribute, value in module._buffers.items())  # noqa: SLF001
            found[name] = own
        return found


# What torch keeps in every module.
_OF_MODULES = frozenset(vars(torch.nn.Module()))


def _mark(value: Any) -> tuple[Any, Any]:
    """The value itself, so that nothing else takes its identity, and what tells of a change in place."""
    if isinstance(value, torch.Tensor):
        return value, None if value.is_inference() else value._version  # noqa: SLF001
    return value, len(value) if isinstance(value, list | dict | set) else None


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    plain = isinstance(one[0], int | float | str | bool) and type(one[0]) is type(other[0])
    return (one[0] is other[0] or (plain and one[0] == other[0])) and one[1] == other[1]
