"""Tests the store's format from Python: elements of any size, copies of labels."""

import json

import pytest
import torch
from support.bits import same_bits
from support.stores import filled

from memascend import cli, engine

ONE_BYTE = [
    name
    for name in (
        "bool",
        "int8",
        "uint8",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
]
COMPLEX = ["complex32", "complex64", "complex128"]


def arbitrary(dtype, numel):
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return values.view(dtype)


# --- elements of any size -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", ONE_BYTE + COMPLEX)
def test_values_of_any_size_beside_twenty_bytes_of_state_come_back(tmp_path, name):
    torch.manual_seed(1)
    narrow = arbitrary(getattr(torch, name), 200_000)
    wide = torch.randn(120_000)
    state = {f"state.{index}": torch.randn(120_000) for index in range(5)}
    records = [
        engine.Record(name="wide", values=wide, state=state, unit="one"),
        engine.Record(name="narrow", values=narrow, state={}, unit="one", buffer=True),
        engine.Record(name="after", values=torch.randn(7), state={}, unit="one", buffer=True),
    ]
    path = tmp_path / "store"
    filled(path, records).close()
    with engine.Store.open(path) as store:
        store.verify()
        for record in records:
            values, found = store.read(record.name)
            assert values.dtype == record.values.dtype
            assert same_bits(values, record.values), record.name
            assert all(torch.equal(found[of], tensor) for of, tensor in record.state.items())


# --- copies -------------------------------------------------------------------------------


def test_a_damaged_label_is_named_by_verify_and_repaired_by_the_next_step(tmp_path, capsys):
    path = tmp_path / "store"
    values = torch.randn(100)
    filled(path, [engine.Record(name="weight", values=values, state={})]).close()
    with path.open("r+b") as file:
        file.write(b"\0" * 4096)
    assert cli.main(["store", "verify", str(path)]) == 1
    assert "the first label of" in capsys.readouterr().out
    assert cli.main(["store", "verify", "--json", str(path)]) == 1
    assert len(json.loads(capsys.readouterr().out)["damaged"]) == 1
    with engine.Store.open(path) as store, engine.Engine(store) as updates:
        updates.fill("weight", values + 1, step=1)
        updates.commit(1)
    assert cli.main(["store", "verify", str(path)]) == 0
    with engine.Store.open(path) as store:
        assert store.damaged() == []
        assert torch.equal(store.read("weight")[0], values + 1)
