"""Tests many openers of one new path at once: one wins, and no failure harms the winner."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from support.stores import filled

from memascend import engine, nvme
from memascend.errors import ConfigError, MemascendError, StorageError

SIZE = 1 << 16


def at_once(count, act):
    """The results of `act(index)` on so many threads that begin together; a MemascendError is a result, too."""
    gate = threading.Barrier(count)

    def run(index):
        gate.wait()
        try:
            return act(index)
        except MemascendError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_of_threads_that_open_one_new_path_one_has_it_and_keeps_it(tmp_path, backend):
    for turn in range(12):
        path = tmp_path / f"volume{turn}"
        results = at_once(8, lambda _, path=path: nvme.open(path, size=SIZE, backend=backend))
        won = [volume for volume in results if isinstance(volume, nvme.Volume)]
        assert len(won) == 1, results
        assert all(isinstance(result, StorageError) for result in results if result is not won[0]), results
        with won[0] as volume:
            volume.write(bytes([turn + 1]) * SIZE, 0).wait()
        assert path.stat().st_size == SIZE, "the file is the winner's, and as long as it was made"
        assert path.read_bytes() == bytes([turn + 1]) * SIZE


def test_a_device_that_is_in_use_takes_nothing_of_the_others_along(tmp_path):
    for turn in range(12):
        paths = [tmp_path / f"{turn}.{index}" for index in range(2)]
        orders = [paths, paths[::-1]]
        results = at_once(6, lambda index, orders=orders: nvme.open(orders[index % 2], size=2 << 20))
        with ExitStack() as closing:
            won = [closing.enter_context(volume) for volume in results if isinstance(volume, nvme.Volume)]
            assert len(won) <= 1, results
            if won:
                assert all(path.exists() for path in paths)
            # Who made a file and had not locked it yet when another did leaves it to that one: nothing is in it.
            assert won or all(not path.exists() or path.stat().st_size == 0 for path in paths)
            assert not won or all(path.stat().st_size == 1 << 20 for path in paths)


def records():
    return [engine.Record(name="weight", values=torch.full((64,), 7.0), state={})]


@pytest.mark.parametrize("existing", ["refuse", "resume"])
@pytest.mark.parametrize("place", ["file", "folder/"])
def test_of_threads_that_make_one_store_one_has_it_and_it_stays(tmp_path, existing, place):
    for turn in range(12):
        path = f"{tmp_path}/{turn}{place}"

        def train(_, path=path):
            with filled(path, records(), existing=existing) as store, engine.Engine(store) as updates:
                made, step = store.created, store.step + 1
                updates.fill("weight", torch.full((64,), 8.0), step=step)
                updates.commit(step)
                return made

        results = at_once(6, train)
        assert results.count(True) == 1, results
        assert existing == "resume" or results.count(False) == 0, results
        with engine.Store.open(path) as store:
            # Each of those that had it made a step of its own.
            assert store.step == results.count(True) + results.count(False)
            assert torch.equal(store.read("weight")[0], torch.full((64,), 8.0))


def test_a_replacement_that_is_too_late_leaves_the_run_that_resumed(tmp_path):
    for turn in range(12):
        path = tmp_path / f"store{turn}"
        filled(path, records()).close()

        def act(index, path=path):
            existing = "replace" if index % 2 else "resume"
            with filled(path, records(), existing=existing) as store, engine.Engine(store) as updates:
                updates.fill("weight", torch.full((64,), float(index)), step=store.step + 1)
                updates.commit(store.step + 1)
                return index

        results = at_once(6, act)
        assert any(isinstance(result, int) for result in results), results
        assert not any(isinstance(result, ConfigError) for result in results), results
        with engine.Store.open(path) as store:
            store.verify()
            assert store.read("weight")[0][0].item() in [result for result in results if isinstance(result, int)]
