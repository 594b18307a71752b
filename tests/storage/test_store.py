"""Tests stores around updates: sizes, orders of dimensions, fetched units."""

import gc
import mmap
from dataclasses import replace

import pytest
import torch
from support.bits import as_bytes
from support.stores import damage, filled

from memascend import engine
from memascend.errors import ConfigError, CorruptionError, UsageError

CHUNK = 2048


def record(name, values, unit, **more):
    return engine.Record(name=name, values=values, state=engine.adam_state(values), unit=unit, **more)


def records(device="cpu"):
    torch.manual_seed(3)
    last = torch.randn(6, 5, 9, 11).bfloat16().contiguous(memory_format=torch.channels_last)
    turned = {"name": "turned", "values": torch.randn(40, 60).t(), "state": {"row": torch.randn(40)}}
    of = [
        record("embed", torch.randn(70, 90).bfloat16(), "one", spill=torch.bfloat16),
        record("bias", torch.randn(7), "one"),
        record("conv", last, "two", order=engine.order_of(last), spill=torch.float32),
        record("nothing", torch.zeros(0, 3), "two"),
        engine.Record(**turned, unit="three", order=(1, 0)),
    ]
    states = [{name: tensor.to(device) for name, tensor in one.state.items()} for one in of]
    return [replace(one, values=one.values.to(device), state=state) for one, state in zip(of, states, strict=True)]


def made(path, **options):
    return filled(path, records(), chunk_elements=CHUNK, **options)


def pages(nbytes):
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


def test_sizes_need_no_device_and_are_what_the_store_and_the_engine_say(tmp_path):
    sizes = engine.sizes(records("meta"), chunk_elements=CHUNK)
    with made(tmp_path / "store") as store, engine.Engine(store, chunks=5) as updates:
        info = store.info()
        of_store = {name: info[name] for name in ("total_bytes", "slot_bytes", "index_bytes", "buffer_bytes")}
        assert of_store == {name: getattr(sizes, name) for name in of_store}
        assert updates.staging_bytes == 5 * sizes.chunk_bytes + sizes.other_bytes
        assert (tmp_path / "store").stat().st_size >= sizes.total_bytes
        store.commit(1, user_state="x" * 5000)
        assert store.info()["index_bytes"] == sizes.index_bytes
    assert list(sizes.unit_bytes) == ["one", "two", "three"]
    assert all(nbytes % engine.PAGE_BYTES == 0 for nbytes in sizes.unit_bytes.values())
    several = engine.sizes(records("meta"), chunk_elements=CHUNK, devices=3)
    with made([tmp_path / name for name in "abc"]) as store:
        assert store.info()["total_bytes"] == several.total_bytes


def test_sizes_refuse_what_cannot_be_stored():
    for bad in [
        [],
        [record("same", torch.zeros(3), "one"), record("same", torch.zeros(3), "one")],
        [record("order", torch.zeros(3, 4), "one", order=(0, 0))],
        [record("order", torch.zeros(3, 4, 5), "one", order=(0, 1))],
    ]:
        with pytest.raises(ConfigError):
            engine.sizes(bad)
    with pytest.raises(ConfigError, match="devices"):
        engine.sizes([record("one", torch.zeros(3), "one")], devices=0)


def test_tensors_come_back_with_the_strides_of_their_order(tmp_path):
    with made(tmp_path / "store") as store:
        described = {one["name"]: one for one in store.records()}
        assert described["conv"]["order"] == (0, 2, 3, 1)
        assert (described["conv"]["spill"], described["bias"]["spill"]) == ("float32", None)
        assert described["embed"]["order"] is None
        for one in records():
            values, state = store.read(one.name)
            assert values.stride() == one.values.stride()
            assert torch.equal(values, one.values)
            for name, tensor in one.state.items():
                assert state[name].stride() == tensor.stride()
                assert torch.equal(state[name], tensor)
        conv = records()[2]
        with engine.Engine(store) as updates:
            with pytest.raises(ConfigError, match="order"):
                updates.fill("conv", conv.values.contiguous(), conv.state)
            with pytest.raises(ConfigError, match="contiguous"):
                updates.fill("embed", torch.zeros(90, 70).bfloat16().t(), records()[0].state)
            with pytest.raises(ConfigError, match="order"):
                updates.update("conv", conv.values.contiguous(), engine.Adam(step=1))


def test_order_of_a_tensor():
    plain = torch.zeros(2, 3, 4, 5)
    assert engine.order_of(plain) is None
    assert engine.order_of(plain.contiguous(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert engine.order_of(plain.permute(3, 1, 0, 2)) == (2, 1, 3, 0)
    assert engine.order_of(torch.zeros(4, 1).t()) is None
    for gaps in (plain[:, :2], torch.zeros(3, 1).expand(3, 4)):
        with pytest.raises(ConfigError):
            engine.order_of(gaps)


def test_fetches_refuse_what_does_not_fit_and_name_what_is_damaged(tmp_path):
    path = tmp_path / "store"
    sizes = engine.sizes(records("meta"), chunk_elements=CHUNK)
    nbytes = sizes.unit_bytes["one"]
    store = made(path)
    for unit, into, match in [
        ("four", pages(nbytes), "no unit"),
        ("one", pages(nbytes + 4096), "bytes, not"),
        ("one", pages(nbytes).view(torch.int8), "uint8"),
        ("one", pages(2 * nbytes)[::2], "contiguous"),
        ("one", pages(nbytes + 1)[1:], "page"),
    ]:
        with pytest.raises(ConfigError, match=match):
            store.fetch(unit, into)
    damage(path, bytes(as_bytes(records()[0].values)[4096:4160].tolist()))
    fetch = store.fetch("one", pages(nbytes))
    for _ in range(2):
        with pytest.raises(CorruptionError, match='chunk 1 of "embed"') as raised:
            fetch.wait()
        assert raised.value.path == str(path)
    del fetch
    gc.collect()
    # One that is open when the store closes is done first.
    late = store.fetch("two", pages(sizes.unit_bytes["two"]))
    store.close()
    assert late.wait() == 1
    with pytest.raises(UsageError):
        store.fetch("two", pages(sizes.unit_bytes["two"]))
