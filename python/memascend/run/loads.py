"""Holds loaded values back until all of a load is known to fit: it is committed whole, or dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from memascend.engine import Engine
    from memascend.residency.placeholder import Place
    from memascend.run.rewrites import Rewrites
    from memascend.run.run import Run


@dataclass
class _Load:
    """One call of a model's `load_state_dict()`."""

    errors: Sequence[str]  # torch's list of what did not fit; where it is not empty, the call has raised
    buffers: Mapping[str, torch.Tensor]  # the values that persistent buffers had before
    staged: list[str] = field(default_factory=list)  # the parameters that get other values


class Loads:
    """What was loaded into the model and is staged, but not committed yet.

    A load has two halves, the model's and the optimizer's, and may be refused in the second. So the model's is held
    back until somebody is about to use the values. That the optimizer takes a state dict says nothing yet: accelerate
    hands it its own one in between.
    """

    def __init__(self, run: Run, rewrites: Rewrites) -> None:
        self._run = run
        self._rewrites = rewrites
        self._held: list[_Load] = []
        self._now: _Load | None = None

    @property
    def changed(self) -> list[str]:
        """Parameters whose loaded values differ from what is committed, and are held back."""
        return [name for load in self._held for name in load.staged]

    # --- one call of load_state_dict() ---------------------------------------------------------

    def begin(self, module: torch.nn.Module, given: Collection[str], errors: Sequence[str]) -> None:
        """A load begins, of `given` names; what is held back is committed first, where it has other values for that."""
        held = set(self.changed)
        if held:
            changed = {
                id(place.parameter)
                for home in self._run.residency.units.homes
                for place in home.places
                if place.name in held
            }
            if any(name in given and id(p) in changed for name, p in module.named_parameters(remove_duplicate=False)):
                self.settle()
        self._run.residency.transfers.begin_loading(self._load)
        buffers = self._run.record.buffers
        self._now = _Load(errors, {name: buffers.target(name).clone() for name in buffers.names})

    def _load(self, place: Place, values: torch.Tensor) -> None:
        assert self._now is not None
        name, load = place.name, self._now
        if name in load.staged:
            # By another name of the same parameter.
            load.staged.remove(name)
            self._run.discard([name])
        # Before it is staged: what an interrupt leaves is dropped, too.
        load.staged.append(name)
        if not self._rewrites.stage(place, values):
            load.staged.remove(name)

    def end(self) -> None:
        """All of it is staged: hold it back."""
        load, self._now = self._now, None
        assert load is not None
        self._held.append(load)
        engine, step, held = self._run.resources.engine, self._run.record.position.step, self._held
        self._run.record.buffers.stage(self._run.resources.store, step)
        self._run.residency.transfers.end_loading(self.settle)
        # Nothing that knows the model: it may be collected before anybody uses what was loaded.
        self._run.resources.finish_first(lambda: _commit(engine, held, step))

    def give_up(self) -> None:
        """Drop a load that was interrupted."""
        if self._now is not None:
            load, self._now = self._now, None
            self._take_back([load])
            self._run.residency.transfers.end_loading(self.settle if self._held else None)

    # --- all of them -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Commit what is held back; what torch refused in part is dropped."""
        if not self._held or self._now is not None:
            return
        with self._run.residency.turns.alone():
            held = self._taken()
            fine = [load for load in held if not load.errors]
            self._take_back(load for load in held if load.errors)
            changed = [name for load in fine for name in load.staged]
            if changed:
                self._rewrites.commit(changed, lambda: self._take_back(fine))

    def drop(self) -> None:
        """Let the model be as it was before."""
        self._take_back(self._taken())

    def _take_back(self, loads: Iterable[_Load]) -> None:
        for load in reversed(list(loads)):
            self._run.discard(load.staged)
            self._restore(load)

    def _taken(self) -> list[_Load]:
        held, self._held = self._held, []
        self._run.residency.transfers.end_loading(None)
        self._run.resources.finish_first(None)
        return held

    def _restore(self, load: _Load) -> None:
        buffers = self._run.record.buffers
        buffers.unstage(self._run.resources.store)
        with torch.no_grad():
            for name, values in load.buffers.items():
                buffers.target(name).copy_(values)


def _commit(engine: Engine, held: list[_Load], step: int) -> None:
    for load in held:
        if load.errors:
            for name in load.staged:
                engine.discard(name)
    if any(load.staged and not load.errors for load in held):
        engine.commit(step)
