"""Tests traces: a file that Perfetto opens, with reads, writes, computing and waiting."""

import json
import mmap
import os
import stat

import pytest
import torch

from memascend import engine
from memascend.errors import ConfigError, StorageError


def made(path):
    values = {'quoted"name': torch.randn(5000).bfloat16(), "other": torch.randn(70)}
    entries = [
        engine.Entry(name=name, values=tensor, state=engine.adam_state(tensor)) for name, tensor in values.items()
    ]
    return engine.Store.create(path, entries, chunk_elements=2048), values


def work(store, updates, values, step):
    for name, tensor in values.items():
        updates.update(name, torch.randn(tensor.shape).to(tensor.dtype), engine.Adam(step=step))
    updates.finish()
    updates.commit(step)
    nbytes = engine.sizes(
        [engine.Entry(name=name, values=tensor, state={}) for name, tensor in values.items()], chunk_elements=2048
    ).unit_bytes["all"]
    store.fetch("all", torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)).wait()


def test_a_trace_tells_what_happened_and_nothing_of_what_came_before_or_after(tmp_path):
    path = tmp_path / "trace.json"
    store, values = made(tmp_path / "store")
    with store, engine.Engine(store) as updates:
        work(store, updates, values, 1)
        updates.trace(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        before = store.counters()
        work(store, updates, values, 2)
        moved = {name: count - before[name] for name, count in store.counters().items()}
        updates.trace_end()
        size = path.stat().st_size
        work(store, updates, values, 3)
        assert path.stat().st_size == size
        updates.trace_end()
    events = json.loads(path.read_text())
    assert {event["pid"] for event in events} == {os.getpid()}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "memascend-updat" in names.values()  # the kernel keeps 15 bytes
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["of"] for event in spans} == {"all", *values}
    of_engine = {"wait for reads", "compute", "stage", "wait for writes"}
    assert {event["name"] for event in spans} == {*of_engine, "wait for unit"}
    # Three chunks of one, one of the other.
    assert sum(event["name"] == "compute" for event in spans) == 4
    assert all(names[event["tid"]] == "memascend-updat" for event in spans if event["name"] in of_engine)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    begun = {event["id"]: event for event in events if event["ph"] == "b"}
    ended = {event["id"]: event for event in events if event["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert all(event["ts"] <= ended[index]["ts"] for index, event in begun.items())
    for name, counter in [("read", "read_bytes"), ("write", "written_bytes")]:
        assert sum(event["args"]["bytes"] for event in begun.values() if event["name"] == name) == moved[counter]
    assert any(event["name"] == "flush" for event in begun.values())


def test_a_trace_refuses_to_overwrite_and_is_whole_when_its_store_closes(tmp_path):
    path = tmp_path / "trace.json"
    store, values = made(tmp_path / "store")
    with store, engine.Engine(store) as updates:
        with pytest.raises(StorageError, match="exist"):
            updates.trace(tmp_path / "store")
        with pytest.raises(StorageError):
            updates.trace(tmp_path / "no" / "trace.json")
        updates.trace(path)
        with pytest.raises(ConfigError, match="already"):
            updates.trace(tmp_path / "second.json")
        work(store, updates, values, 1)
    assert len(json.loads(path.read_text())) > 10
    with engine.Store.open(tmp_path / "store") as store:
        assert store.step == 1


def test_a_trace_whose_disk_is_full_says_so_at_its_end(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    store, values = made(tmp_path / "store")
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=8k none {small}"):  # noqa: S605
        pytest.skip("mounting is not allowed")
    try:
        with store, engine.Engine(store) as updates:
            updates.trace(small / "trace.json")
            for step in range(1, 30):
                work(store, updates, values, step)
            with pytest.raises(StorageError, match="write"):
                updates.trace_end()
            work(store, updates, values, 30)
    finally:
        os.system(f"umount {small}")  # noqa: S605
