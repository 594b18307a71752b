"""Goes back to an older step of the store, from a checkpoint of it, in one commit."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memascend.checkpoint.manifest import Checkpoint
from memascend.checkpoint.reader import CheckpointValues

if TYPE_CHECKING:
    import os

    from memascend.optimizers.update_rule import Arithmetic
    from memascend.run.run import Run

# What may wait for the engine at once; a larger parameter is let in alone.
_WAITING_BYTES_MAX = 16 << 20


class _Unit(NamedTuple):
    parameters: tuple[str, ...]


class Rollback:
    """Lets a run stand where a checkpoint of it was written."""

    def __init__(self, model: torch.nn.Module, arithmetic: Arithmetic, run: Run) -> None:
        self._model = model
        self._arithmetic = arithmetic
        self._run = run

    def go_to(self, folder: str | os.PathLike[str]) -> None:
        """Commit what a checkpoint holds: values, state, counts, buffers, loss scale and `user_state`.

        Raises:
            ConfigError, CorruptionError: it does not fit, or is damaged; nothing was changed.
            UsageError: a step is staged.
        """
        source = self._source(Checkpoint(folder))
        source.check()
        self._run.require_quiet()
        record, engine, buffers = self._run.record, self._run.resources.engine, self._run.record.buffers
        with contextlib.ExitStack() as undo, self._run.residency.turns.alone():
            for name in buffers.names:
                undo.callback(_restore, buffers.target(name), buffers.target(name).clone())
            undo.callback(engine.discard)
            counts = self._stage(source)
            hyperparameters = source.hyperparameters([])
            self._arithmetic.shared.restore(hyperparameters.get("attributes") or {}, undo)
            line = self._run.resources.store.info()["generation"]
            hyperparameters["line"] = line
            engine.commit(source.step, user_state=source.user_state, hyperparameters=hyperparameters)
            undo.pop_all()
            names = [place.name for home in self._run.residency.units.homes for place in home.places]
            self._run.changed(names)
            for name, count in counts.items():
                self._run.gradients.by_name[name].step = count
            buffers.committed()
            record.user_state = source.user_state
            scale = hyperparameters.get("loss_scale")
            if scale and scale.get("mode") == record.scale.mode:
                record.scale.load(scale)
            record.position.go_back(source.step, hyperparameters["origin"], line)

    def _source(self, checkpoint: Checkpoint) -> CheckpointValues:
        places = {place.name: place.parameter for home in self._run.residency.units.homes for place in home.places}
        buffers = {name: self._run.record.buffers.tensor(name) for name in self._run.record.buffers.names}
        trained = self._run.gradients.by_name.keys()
        return CheckpointValues(checkpoint, self._model, places, buffers, self._arithmetic, trained)

    def _stage(self, source: CheckpointValues) -> dict[str, int]:
        """Stage all of it; how many updates made each parameter that is trained."""
        engine, record = self._run.resources.engine, self._run.record
        counts, waiting = {}, 0
        units: Any = [_Unit(tuple(place.name for place in home.places)) for home in self._run.residency.units.homes]
        with contextlib.closing(source.parameters(units)) as found:
            for name, values, state, step in found:
                engine.fill(name, values, state, step=step)
                if name in self._run.gradients.by_name:
                    counts[name] = step
                waiting += values.nbytes + sum(tensor.nbytes for tensor in state.values())
                if waiting >= _WAITING_BYTES_MAX:
                    engine.finish()
                    waiting = 0
        for name in record.buffers.names:
            source.buffer(name, record.buffers.target(name))
        record.buffers.stage(self._run.resources.store, source.step)
        engine.finish()
        return counts


def _restore(target: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(values)
