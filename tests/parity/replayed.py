"""Compares a store as kill -9 would leave it with the run that goes on: its log is replayed to the same bits."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from support.bits import same_bits

from memascend.engine import Engine, Store

if TYPE_CHECKING:
    from pathlib import Path


def require_replay(optimizer, file: Path) -> None:
    """A copy of the run's store, with its log, has what memory has: where it is only read, and replayed."""
    running = optimizer._session.run.resources.store
    copy = file.with_name("as-killed.store")
    shutil.copyfile(file, copy)
    try:
        with Store.open(copy) as store:
            _require_same(running, store)
            with Engine(store, chunks=2) as engine:
                assert engine.replay() == bool(running.info()["log_steps"])
            assert store.info()["log_steps"] == 0
            _require_same(running, store)
        # Whoever comes next finds it on storage alone.
        with Store.open(copy) as store:
            _require_same(running, store)
    finally:
        copy.unlink()


def _require_same(running: Store, found: Store) -> None:
    assert found.step == running.step
    for described in running.each_record():
        name = described["name"]
        if described["buffer"]:
            continue
        (values, state), (found_values, found_state) = running.read(name), found.read(name)
        assert same_bits(values, found_values), name
        assert state.keys() == found_state.keys()
        assert [key for key in state if not same_bits(state[key], found_state[key])] == [], name
