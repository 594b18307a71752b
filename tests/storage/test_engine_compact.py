"""Tests values that are resident beside a compact state, by the bytes that updates move; and walks over all bytes."""

import pytest
import torch
from support.bits import same_bits
from support.stores import CHUNK

from memascend import engine
from memascend.errors import UsageError


def compact(values):
    return engine.encode_state(values, {}, "compact") if values.dtype == torch.bfloat16 else engine.adam_state(values)


def made(path, values):
    record = engine.Record(name="w", values=values, state=compact(values))
    return engine.Store.create(path, [record], chunk_elements=CHUNK)


def test_values_that_are_resident_are_not_read(tmp_path):
    numel = 3 * CHUNK
    values = torch.randn(numel).bfloat16()
    with made(tmp_path, values) as store, engine.Engine(store) as updates:
        before = updates.counters()

        def moved(live):
            updates.update("w", torch.ones(numel).bfloat16(), engine.Adam(step=1), values=live)
            updates.finish()
            updates.discard()
            counters = updates.counters()
            kinds = ("state_read", "values_read", "state_written", "values_written")
            bytes_moved = [(counters[kind] - before[kind]) / numel for kind in kinds]
            before.update(counters)
            return bytes_moved

        assert moved(None) == [10, 2, 10, 2]
        assert moved(values) == [10, 0, 10, 2]
        assert store.info()["slot_bytes"] == 12 * numel
    meta = values.to("meta")
    for state, wanted in ((compact(meta), 12), (engine.adam_state(meta), 14)):
        record = engine.Record(name="w", values=meta, state=state)
        assert engine.sizes([record], chunk_elements=CHUNK).slot_bytes == wanted * numel


def test_a_walk_shows_every_byte_once(tmp_path):
    torch.manual_seed(3)
    made_of = {
        "bf16": torch.randn(5000).bfloat16(),
        "none": torch.zeros(0),
        "f32": torch.randn(3, 1741),
    }
    odd = {"row": torch.randn(600), "moment": torch.randn(700, 600), "big": torch.randn(300_000)}
    records = [engine.Record(name=name, values=tensor, state=compact(tensor)) for name, tensor in made_of.items()]
    records.append(engine.Record(name="odd", values=torch.randn(700, 600), state=odd))
    with engine.Store.create(tmp_path / "store", records, chunk_elements=CHUNK) as store:
        found = {}

        def visit(name, parts):
            assert len({part.values.numel() for part in parts}) == 1
            for part in parts:
                kept = found.setdefault((name, part.of), [])
                assert sum(map(len, kept)) == part.start
                kept.append(part.values.clone())

        store.scan([record.name for record in records], visit)
        for record in records:
            values, state = store.read(record.name)
            for of, tensor in {"": values, **state}.items():
                got = torch.cat(found.pop((record.name, of), [tensor[:0].reshape(-1)]))
                assert same_bits(got, tensor.reshape(-1)), (record.name, of)
        assert not found
        with pytest.raises(ZeroDivisionError):
            store.scan(["f32"], lambda *_: 1 / 0)
        kept = []
        with pytest.raises(UsageError, match="clone"):
            store.scan(["f32"], lambda _, parts: kept.append(parts))
