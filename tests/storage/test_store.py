"""Tests stores without updates: sizes, dtypes, orders of dimensions, fetched units and parts, copies of labels."""

import gc
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.bits import as_bytes, same_bits
from support.stores import CHUNK, damage, filled, in_one, pages, two_units

from memascend import engine
from memascend.cli import main
from memascend.errors import ConfigError, CorruptionError, UsageError

ONE_BYTE = ["bool", "int8", "uint8"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
COMPLEX = ["complex32", "complex64", "complex128"]


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


def test_sizes_of_meta_records_equal_those_of_store_and_engine(tmp_path):
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


def test_sizes_rejects_records_that_cannot_be_stored():
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


def test_read_returns_values_and_state_with_their_strides(tmp_path):
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


def test_order_of_returns_the_dimension_order_and_rejects_gaps():
    plain = torch.zeros(2, 3, 4, 5)
    assert engine.order_of(plain) is None
    assert engine.order_of(plain.contiguous(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert engine.order_of(plain.permute(3, 1, 0, 2)) == (2, 1, 3, 0)
    assert engine.order_of(torch.zeros(4, 1).t()) is None
    for gaps in (plain[:, :2], torch.zeros(3, 1).expand(3, 4)):
        with pytest.raises(ConfigError):
            engine.order_of(gaps)


def test_fetch_rejects_unfit_memory_and_names_a_damaged_chunk(tmp_path):
    path = tmp_path / "store"
    sizes = engine.sizes(records("meta"), chunk_elements=CHUNK)
    nbytes = sizes.unit_bytes["one"]
    store = made(path)
    updates = engine.Engine(store)
    for unit, into, match in [
        ("four", pages(nbytes), "no unit"),
        ("one", pages(nbytes + 4096), f"give memory of {nbytes} bytes"),
        ("one", pages(nbytes).view(torch.int8), "uint8"),
        ("one", pages(2 * nbytes)[::2], "contiguous"),
        ("one", pages(nbytes + 1)[1:], "at an address that is a multiple of 4096; pass a page-aligned tensor"),
    ]:
        with pytest.raises(ConfigError, match=match):
            updates.fetch(unit, into)
    damage(path, bytes(as_bytes(records()[0].values)[4096:4160].tolist()))
    fetch = updates.fetch("one", pages(nbytes))
    for _ in range(2):
        with pytest.raises(CorruptionError, match='chunk 1 of "embed"') as raised:
            fetch.wait()
        assert raised.value.path == str(path)
    del fetch
    gc.collect()
    # close() waits for a fetch that is in flight, so this fetch succeeds.
    late = updates.fetch("two", pages(sizes.unit_bytes["two"]))
    store.close()
    late.wait()
    with pytest.raises(UsageError):
        updates.fetch("two", pages(sizes.unit_bytes["two"]))


class InterruptedDtype:
    """Stands in for a dtype whose text is being computed when Ctrl-C is pressed."""

    def __str__(self):
        raise KeyboardInterrupt


def test_an_interrupt_while_a_dtype_is_read_is_raised(tmp_path):
    with made(tmp_path / "store") as store:
        updates = engine.Engine(store)
        with pytest.raises(KeyboardInterrupt):
            updates.fetch("one", SimpleNamespace(dtype=InterruptedDtype()))


@pytest.mark.parametrize("bytes_max", [8 << 10, 20 << 10, 1 << 20])
def test_parts_of_a_unit_join_to_the_bytes_of_the_unit(tmp_path, bytes_max):
    with two_units(tmp_path) as store, engine.Engine(store) as updates:
        whole, parts = in_one(updates, "second"), updates.parts("second", bytes_max)
        into = torch.zeros_like(whole)
        for index, (start, nbytes) in enumerate(parts.places()):
            assert nbytes <= bytes_max
            parts.begin(index, chunk := pages(nbytes)).wait()
            into[start : start + nbytes] = chunk
        assert torch.equal(into, whole)
        with pytest.raises(ConfigError, match='an extent of unit "first" has 8192 bytes, but parts hold 4096'):
            updates.parts("first", 4096)
        with pytest.raises(ConfigError, match="no unit 'third'"):
            updates.parts("third", 1 << 20)
        with pytest.raises(ConfigError):
            updates.parts("first", 1 << 20).begin(0, pages(4096))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", ONE_BYTE + FLOAT8 + COMPLEX)
def test_values_of_any_element_size_are_read_back_bit_for_bit(tmp_path, name):
    torch.manual_seed(1)
    dtype = getattr(torch, name)
    values = torch.randint(2 if dtype == torch.bool else 256, (200_000 * dtype.itemsize,), dtype=torch.uint8)
    wide = torch.randn(120_000)
    state = {f"state.{index}": torch.randn(120_000) for index in range(5)}
    given = [
        engine.Record(name="wide", values=wide, state=state, unit="one"),
        engine.Record(name="narrow", values=values.view(dtype), state={}, unit="one", buffer=True),
        engine.Record(name="after", values=torch.randn(7), state={}, unit="one", buffer=True),
    ]
    path = tmp_path / "store"
    filled(path, given).close()
    with engine.Store.open(path) as store:
        store.verify()
        for one in given:
            values, found = store.read(one.name)
            assert values.dtype == one.values.dtype
            assert same_bits(values, one.values), one.name
            assert all(torch.equal(found[of], tensor) for of, tensor in one.state.items())


def test_a_damaged_label_is_named_by_verify_and_repaired_by_the_next_step(tmp_path, capsys):
    path = tmp_path / "store"
    values = torch.randn(100)
    filled(path, [engine.Record(name="weight", values=values, state={})]).close()
    with path.open("r+b") as file:
        file.write(b"\0" * 4096)
    assert main(["store", "verify", str(path)]) == 1
    assert "the first label of" in capsys.readouterr().out
    assert main(["store", "verify", "--json", str(path)]) == 1
    assert len(json.loads(capsys.readouterr().out)["damaged"]) == 1
    with engine.Store.open(path) as store, engine.Engine(store) as updates:
        updates.fill("weight", values + 1, step=1)
        updates.commit(1)
    assert main(["store", "verify", str(path)]) == 0
    with engine.Store.open(path) as store:
        assert store.damaged() == []
        assert torch.equal(store.read("weight")[0], values + 1)
