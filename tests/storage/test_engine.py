"""Tests stores, first values and updates from Python: what is refused, what is shown, and walks that end early."""

import re

import pytest
import torch
from support.stores import CHUNK, filled, parameters

from memascend import engine
from memascend.cli import main
from memascend.errors import ConfigError, StorageError, UsageError

SMALL = "bfloat16.(13,)"


def made(path, **options):
    records = [
        engine.Record(name=name, values=values, state=engine.adam_state(values), unit=name.split(".")[0])
        for name, values in parameters().items()
    ]
    frozen = engine.Record(name="frozen", values=torch.arange(5000.0).bfloat16(), state={}, unit="rest")
    buffer = engine.Record(name="mean", values=torch.zeros(3), state={}, unit="rest", buffer=True)
    return filled(path, [*records, frozen, buffer], chunk_elements=CHUNK, **options)


def test_devices_that_are_swapped_missing_or_foreign_are_named(tmp_path):
    paths = [tmp_path / "one", tmp_path / "two"]
    made(paths).close()
    with pytest.raises(StorageError, match="is device 2 of the store and was given as device 1"):
        engine.Store.open(paths[::-1])
    with pytest.raises(StorageError, match="has 2 devices, and 1 were given"):
        engine.Store.open(paths[0])
    made([tmp_path / "three", tmp_path / "four"]).close()
    with pytest.raises(StorageError, match="another store") as error:
        engine.Store.open([paths[0], tmp_path / "four"])
    assert error.value.path == str(tmp_path / "four")
    with engine.Store.open(paths) as store:
        store.verify()


def test_info(tmp_path, capsys):
    made(tmp_path).close()
    assert main(["store", "info", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    summary, records = output.split("\n\n")
    assert "in 22 tensors (" in summary
    assert re.search(r"^buffers +1$", summary, re.MULTILINE)
    assert "22 parameters" not in summary
    assert len(records.splitlines()) == 2 + 23
    assert "3 x 1741" in output
    assert main(["store", "info", str(tmp_path / "none")]) == 1


def test_what_does_not_fit_is_refused_and_loses_nothing(tmp_path):
    with made(tmp_path / "store") as store, engine.Engine(store) as updates:
        with pytest.raises(ConfigError, match="no record"):
            updates.update("nobody", torch.zeros(1), engine.Adam(step=1))
        with pytest.raises(ConfigError, match="has shape"):
            updates.update(SMALL, torch.zeros(14), engine.Adam(step=1))
        with pytest.raises(ConfigError, match="lr"):
            updates.update(SMALL, torch.zeros(13), engine.Adam(step=1, lr=-1))
        with pytest.raises(ConfigError, match="Adam's state"):
            updates.update("frozen", torch.zeros(5000), engine.Adam(step=1))
        with pytest.raises(ConfigError, match="JSON"):
            updates.commit(1, user_state={1, 2})
        with pytest.raises(ConfigError, match="at most 65536"):
            updates.commit(1, user_state="x" * 70_000)
        updates.update(SMALL, torch.zeros(13), engine.Adam(step=1))
        updates.finish()
        updates.update(SMALL, torch.zeros(13), engine.Adam(step=1))
        with pytest.raises(UsageError, match="staged already"):
            updates.finish()
        with pytest.raises(UsageError, match="only be discarded"):
            updates.commit(1)
        updates.discard()
        assert store.step == 0
        updates.update(SMALL, torch.zeros(13), engine.Adam(step=1))
        updates.commit(1)
        assert store.step == 1
    with pytest.raises(UsageError, match="closed"):
        store.commit(1)
    store.close()


def test_first_values_that_do_not_fit_are_refused(tmp_path):
    small = engine.Record(name="small", values=torch.zeros(13).bfloat16(), state={})
    bare = engine.Record(name="bare", values=torch.zeros(5000, dtype=torch.int64), state={})
    odd = engine.Record(name="odd", values=torch.zeros(700, 600), state={"row": torch.zeros(600)})
    store = engine.Store.create(tmp_path / "store", [small, bare, odd], chunk_elements=CHUNK)
    with store, engine.Engine(store) as filling:
        with pytest.raises(ConfigError, match="no record"):
            filling.fill("nobody", torch.zeros(3))
        with pytest.raises(ConfigError, match="is float32 of shape"):
            filling.fill("small", torch.zeros(13))
        with pytest.raises(ConfigError, match="no state called 'momentum'"):
            filling.fill("bare", torch.zeros(5000, dtype=torch.int64), {"momentum": torch.zeros(1)})
        with pytest.raises(ConfigError, match="float32 of \\[600\\]"):
            filling.fill("odd", torch.zeros(700, 600), {"row": torch.zeros(700)})
        filling.close()
        with pytest.raises(UsageError, match="closed"):
            filling.fill("bare", torch.zeros(5000, dtype=torch.int64))


def test_adam_begins_with_a_master_of_16_bit_values():
    values = torch.randn(5)
    assert engine.adam_state(values).keys() == {"exp_avg", "exp_avg_sq"}
    assert torch.equal(engine.adam_state(values.half())["master"], values.half().float())


def test_a_walk_shows_each_part_at_its_place_and_ends_by_an_error(tmp_path):
    record = engine.Record(name="w", values=torch.randn(3, 1741), state={})
    with filled(tmp_path / "store", [record], chunk_elements=CHUNK) as store:
        found = torch.zeros(record.values.numel())
        store.scan(
            ["w"], lambda _, parts: [found[part.start :][: len(part.values)].copy_(part.values) for part in parts]
        )
        assert torch.equal(found, record.values.view(-1))
        with pytest.raises(ZeroDivisionError):
            store.scan(["w"], lambda *_: 1 / 0)
        kept = []
        with pytest.raises(UsageError, match="clone"):
            store.scan(["w"], lambda _, parts: kept.append(parts))
