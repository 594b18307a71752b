"""Tests the first values of records: given, zeros, widened; and discarding one record's work."""

import pytest
import torch
from support.bits import same_bits
from support.stores import CHUNK, filled, parameters

from memascend import engine
from memascend.errors import ConfigError, UsageError


def records():
    values = parameters()
    made = [engine.Record(name=name, values=tensor, state=engine.adam_state(tensor)) for name, tensor in values.items()]
    big = torch.arange(300_000, dtype=torch.float64)
    odd = {"step": torch.tensor(7.0), "row": torch.randn(600), "moment": torch.randn(700, 600), "big": big}
    made.append(engine.Record(name="odd", values=torch.randn(700, 600), state=odd))
    made.append(engine.Record(name="bare", values=torch.randint(0, 99, (5000,)), state={}))
    made.append(engine.Record(name="alone", values=torch.randn(3), state={"step": torch.tensor(3)}))
    return made


def zeroed(record):
    return engine.Record(
        name=record.name,
        values=torch.zeros_like(record.values),
        state={of: torch.zeros_like(tensor) for of, tensor in record.state.items()},
    )


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("chunks", [2, 4])
def test_what_was_filled_is_what_was_given(tmp_path, given, chunks):
    wanted = records()
    with filled(tmp_path / "store", [zeroed(record) for record in wanted], chunk_elements=CHUNK) as store:
        with engine.Engine(store, chunks=chunks, queue=20_000) as filling:
            for record in wanted:
                filling.fill(record.name, record.values.clone(), dict(record.state) if given else None)
            filling.commit(1)
            counters = filling.counters()
            assert counters["fills"] == len(wanted)
            assert counters["state_read"] == counters["values_read"] == 0
        store.verify()
        for record in wanted:
            values, state = store.read(record.name)
            assert same_bits(values, record.values), record.name
            for of, tensor in state.items():
                begun = record.values.float() if of == "master" else torch.zeros_like(tensor)
                assert same_bits(tensor, record.state[of] if given else begun), (record.name, of)


def test_what_does_not_fit_is_refused(tmp_path):
    made = engine.Store.create(tmp_path / "store", records(), chunk_elements=CHUNK)
    with made as store, engine.Engine(store) as filling:
        with pytest.raises(ConfigError, match="no record"):
            filling.fill("nobody", torch.zeros(3))
        with pytest.raises(ConfigError, match="is float32 of shape"):
            filling.fill("bfloat16.(13,)", torch.zeros(13))
        with pytest.raises(ConfigError, match="no state called 'momentum'"):
            filling.fill("bare", torch.zeros(5000, dtype=torch.int64), {"momentum": torch.zeros(1)})
        with pytest.raises(ConfigError, match="float32 of \\[600\\]"):
            filling.fill("odd", torch.zeros(700, 600), {"row": torch.zeros(700)})
        filling.close()
        with pytest.raises(UsageError, match="closed"):
            filling.fill("alone", torch.zeros(3))


def test_adam_begins_with_a_master_of_16_bit_values():
    values = torch.randn(5)
    assert engine.adam_state(values).keys() == {"exp_avg", "exp_avg_sq"}
    assert torch.equal(engine.adam_state(values.half())["master"], values.half().float())
