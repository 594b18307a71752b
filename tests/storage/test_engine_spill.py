"""Tests spilled gradients: torch's bits in every dtype, job order, damage, discards and errors."""

import pytest
import torch
from support.bits import same_bits
from support.stores import CHUNK, DTYPES, NUMBERS, damage, filled, parameters

from memascend import engine, kernels
from memascend.errors import ConfigError, CorruptionError, UsageError
from memascend.tensors import rounded


def units(squares):
    """A sum of squares as the engine tells it."""
    return squares << 298


def made(path, spill=None, **options):
    records = [
        engine.Record(name=name, values=values, state=engine.adam_state(values), spill=spill or values.dtype)
        for name, values in parameters().items()
    ]
    records.append(engine.Record(name="frozen", values=torch.zeros(3), state={}))
    return filled(path, records, chunk_elements=CHUNK, **options)


def gradient(shape, dtype):
    # Wide enough for denormals and for sums that overflow float16.
    return (torch.randn(shape) * torch.rand(shape).mul(40).sub(24).exp2()).clamp(-60_000, 60_000).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [2, 5])
def test_sums_norms_and_updates_have_the_bits_of_torch(tmp_path, dtype, chunks):
    held = parameters()
    states = {name: engine.adam_state(values) for name, values in held.items()}
    factors = (0.37, 1.0, 1 / 3)
    with made(tmp_path / "store", dtype) as store, engine.Engine(store, chunks=chunks, queue=20_000) as updates:
        for step in range(1, 4):
            total = {name: gradient(values.shape, dtype) for name, values in held.items()}
            for name, tensor in total.items():
                updates.spill(name, tensor.clone())
            for _ in range(2):
                for name, tensor in total.items():
                    more = gradient(tensor.shape, dtype)
                    tensor.add_(more)
                    updates.spill(name, more, add=True)
            for name, tensor in total.items():
                nonfinite, squared = updates.spilled(name)
                wanted = float(tensor.double().square().sum())
                assert nonfinite == (not torch.isfinite(tensor).all())
                assert nonfinite or rounded(squared) == pytest.approx(wanted, rel=1e-6)
                back = torch.empty_like(tensor)
                updates.read_spilled(name, back)
                assert same_bits(back, tensor), name
                updates.update_spilled(name, engine.Adam(step=step, **NUMBERS), factors=factors)
            updates.commit(step)
            for name, values in held.items():
                for factor in factors:
                    total[name].mul_(factor)
                state = states[name]
                master, out = (values, None) if values.dtype == torch.float32 else (state["master"], values)
                moments = state["exp_avg"], state["exp_avg_sq"]
                kernels.adamw(master, total[name], *moments, out, step=step, **NUMBERS)
        for name, values in held.items():
            stored, state = store.read(name)
            assert torch.equal(stored.nan_to_num(7), values.nan_to_num(7)), name
            assert all(torch.equal(state[of].nan_to_num(7), held.nan_to_num(7)) for of, held in states[name].items())
            updates.spilled(name)
        assert updates.counters()["spills"] == 9 * len(held)
        assert store.info()["spill_index_bytes"] > 0


def test_what_does_not_fit_is_refused(tmp_path):
    with made(tmp_path / "store") as store, engine.Engine(store) as updates:
        with pytest.raises(ConfigError, match="room for 13 of bfloat16"):
            updates.spill("bfloat16.(13,)", torch.zeros(13))
        with pytest.raises(ConfigError, match="has shape"):
            updates.spill("bfloat16.(13,)", torch.zeros(14).bfloat16())
        with pytest.raises(ConfigError, match="without room"):
            updates.spill("frozen", torch.zeros(3))
        with pytest.raises(ConfigError, match="spills as bfloat16"):
            updates.read_spilled("bfloat16.(13,)", torch.zeros(13))
        updates.finish()


def test_a_flipped_bit_is_an_error_with_a_name(tmp_path):
    path = tmp_path / "store"
    name, other = "float32.(3, 1741)", "float32.(2049,)"
    with made(path) as store, engine.Engine(store) as updates:
        values = gradient((3, 1741), torch.float32)
        updates.spill(name, values)
        updates.spill(other, torch.ones(2049))
        updates.finish()
        damage(path, values.view(-1).view(torch.uint8).numpy().tobytes()[8192:12288])
        for use in (
            lambda: updates.read_spilled(name, torch.empty(3, 1741)),
            lambda: (updates.update_spilled(name, engine.Adam(step=1)), updates.finish()),
            lambda: (updates.spill(name, values, add=True), updates.finish()),
        ):
            with pytest.raises(CorruptionError, match=f"chunk 1 of the spilled gradient of .{name[:7]}.*is damaged"):
                use()
            with pytest.raises(UsageError, match="only be discarded"):
                updates.commit(1)
            updates.discard()
        # The sum that failed half-way is gone; others are not.
        with pytest.raises(UsageError, match="no gradient of"):
            updates.spilled(name)
        assert updates.spilled(other) == (False, units(2049))
        updates.spill(name, values)
        updates.update_spilled(name, engine.Adam(step=1))
        updates.commit(1)
