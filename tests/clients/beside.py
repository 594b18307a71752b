"""Runs a loop or a Trainer with the model in memory or offloaded, and compares the results."""

from __future__ import annotations

import contextlib

from support.bits import same_states
from support.chains import values

import memascend
import memascend.trainer

__all__ = ["both", "door", "results", "same_results"]


def both(folder, make, loop, **options):
    """Runs `loop` in memory and then offloaded; returns both results. `make` makes a new model for each run."""
    found = []
    for offloads in (False, True):
        model, optimizer = make()
        with contextlib.ExitStack() as until:
            if offloads:
                model, optimizer = memascend.offload(model, optimizer, storage=folder / "run.store", **options)
                until.enter_context(optimizer)
            found.append(loop(model, optimizer))
    return found


def door(model, optimizer):
    """Returns the context in which the caller may write to the weights."""
    is_offloaded = isinstance(optimizer, memascend.OffloadedOptimizer)
    return memascend.materialized(model, modify=True) if is_offloaded else contextlib.nullcontext()


def results(trainer, storage=None, **options):
    """Trains, offloaded if `storage` is given; returns the losses and norms of the Trainer's log, and the weights."""
    optimizer = storage and memascend.trainer.offload(trainer, storage=storage, **options)
    with optimizer or contextlib.nullcontext():
        trainer.train()
        logs = [(line["loss"], line.get("grad_norm")) for line in trainer.state.log_history if "loss" in line]
        return logs, values(trainer.model)


def same_results(one, other):
    return one[0] == other[0] and same_states(one[1], other[1])
