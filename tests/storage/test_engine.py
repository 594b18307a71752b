"""Tests stores, first values, updates, spilled gradients and formats of state from Python: errors, bits, damage."""

import re
from functools import partial

import pytest
import torch
from support import blockwise
from support.bits import same_bits, same_states
from support.stores import CHUNK, DTYPES, NUMBERS, damage, filled, parameters

from benchmarks.reduced import encoded
from memascend import engine, kernels
from memascend.cli import main
from memascend.errors import ConfigError, CorruptionError, StorageError, UsageError
from memascend.tensors import rounded

SMALL = "bfloat16.(13,)"


def made(path, spill=None):
    records = [
        engine.Record(
            name=name,
            values=values,
            state=engine.adam_state(values),
            unit=name.split(".")[0],
            spill=spill or values.dtype,
        )
        for name, values in parameters().items()
    ]
    frozen = engine.Record(name="frozen", values=torch.arange(5000.0).bfloat16(), state={}, unit="rest")
    buffer = engine.Record(name="mean", values=torch.zeros(3), state={}, unit="rest", buffer=True)
    return filled(path, [*records, frozen, buffer], chunk_elements=CHUNK)


def test_open_error_names_swapped_missing_or_foreign_devices(tmp_path):
    paths = [tmp_path / "one", tmp_path / "two"]
    made(paths).close()
    with pytest.raises(StorageError, match="is device 2 of the store and was given as device 1"):
        engine.Store.open(paths[::-1])
    with pytest.raises(StorageError, match="has 2 devices, and 1 were given"):
        engine.Store.open(paths[0])
    made([tmp_path / "three", tmp_path / "four"]).close()
    with pytest.raises(StorageError, match="belong to different stores") as error:
        engine.Store.open([paths[0], tmp_path / "four"])
    assert error.value.path == str(tmp_path / "four")
    with engine.Store.open(paths) as store:
        store.verify()


def test_store_info_command_counts_tensors_and_buffers(tmp_path, capsys):
    made(tmp_path).close()
    assert main(["store", "info", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    summary, records = output.split("\n\n")
    assert "in 22 tensors (" in summary
    assert re.search(r"^buffers +1$", summary, re.MULTILINE)
    assert "22 parameters" not in summary
    assert len(records.splitlines()) == 2 + 23
    assert main(["store", "info", "--verbose", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.split("\n\n")[1].splitlines()) == 2 + 23
    assert "3 x 1741" in output
    assert main(["store", "info", str(tmp_path / "none")]) == 1


def test_engine_rejects_bad_arguments_and_double_updates_without_loss(tmp_path):
    adam = engine.Adam(step=1)
    with made(tmp_path / "store") as store, engine.Engine(store) as updates:
        for call, words in {
            lambda: updates.update("nobody", torch.zeros(1), adam): "no record",
            lambda: updates.update(SMALL, torch.zeros(14), adam): "has shape",
            lambda: updates.update(SMALL, torch.zeros(13), engine.Adam(step=1, lr=-1)): "lr",
            lambda: updates.update("frozen", torch.zeros(5000), adam): "Adam's state",
            lambda: updates.commit(1, user_state={1, 2}): "JSON",
            lambda: updates.commit(1, user_state="x" * 70_000): "at most 65536",
            lambda: updates.spill(SMALL, torch.zeros(13)): "room for 13 elements of bfloat16",
            lambda: updates.spill(SMALL, torch.zeros(14).bfloat16()): "has shape",
            lambda: updates.spill("frozen", torch.zeros(5000).bfloat16()): "without room",
            lambda: updates.read_spilled(SMALL, torch.zeros(13)): "spills as bfloat16",
            lambda: updates.apply(SMALL, print, step=1, gradient=torch.zeros(3)): "has shape",
            lambda: updates.apply("nobody", print, step=1): "no record",
            lambda: updates.fill("nobody", torch.zeros(3)): "no record",
            lambda: updates.fill(SMALL, torch.zeros(13)): "is float32 of shape",
        }.items():
            with pytest.raises(ConfigError, match=words):
                call()
        with pytest.raises(UsageError, match="no gradient of"):
            updates.apply(SMALL, print, step=1)
        updates.update(SMALL, torch.zeros(13), adam)
        updates.finish()
        updates.update(SMALL, torch.zeros(13), adam)
        with pytest.raises(UsageError, match="staged already"):
            updates.finish()
        with pytest.raises(UsageError, match="only be discarded"):
            updates.commit(1)
        updates.discard()
        assert store.step == 0
        updates.update(SMALL, torch.zeros(13), adam)
        updates.commit(1)
        assert store.step == 1
    with pytest.raises(UsageError, match="closed"):
        store.commit(1)
    store.close()


def test_fill_rejects_state_that_does_not_fit_the_record(tmp_path):
    bare = engine.Record(name="bare", values=torch.zeros(5000, dtype=torch.int64), state={})
    odd = engine.Record(name="odd", values=torch.zeros(700, 600), state={"row": torch.zeros(600)})
    store = engine.Store.create(tmp_path / "store", [bare, odd], chunk_elements=CHUNK)
    with store, engine.Engine(store) as filling:
        with pytest.raises(ConfigError, match="no state tensor called 'momentum'"):
            filling.fill("bare", bare.values, {"momentum": torch.zeros(1)})
        with pytest.raises(ConfigError, match="float32 of shape \\[600\\]"):
            filling.fill("odd", odd.values, {"row": torch.zeros(700)})
        filling.close()
        with pytest.raises(UsageError, match="closed"):
            filling.fill("bare", bare.values)


def test_adam_state_has_a_float32_master_only_for_16_bit_values():
    values = torch.randn(5)
    assert engine.adam_state(values).keys() == {"exp_avg", "exp_avg_sq"}
    assert torch.equal(engine.adam_state(values.half())["master"], values.half().float())


def test_scan_gives_each_part_at_its_place_and_raises_callback_errors(tmp_path):
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


# --- spilled gradients ----------------------------------------------------------------------------


def gradient(shape, dtype):
    # The values range so widely that some are denormals in float16, and that some sums overflow float16.
    return (torch.randn(shape) * torch.rand(shape).mul(40).sub(24).exp2()).clamp(-60_000, 60_000).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [2, 5])
def test_spilled_sums_norms_and_updates_have_same_bits_as_torch(tmp_path, dtype, chunks):
    held = parameters()
    states = {name: engine.adam_state(values) for name, values in held.items()}
    factors = (0.37, 1.0, 1 / 3)
    with made(tmp_path / "store", spill=dtype) as store, engine.Engine(store, chunks=chunks, queue=20_000) as updates:
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


def test_corrupt_spilled_gradient_raises_an_error_that_names_its_chunk(tmp_path):
    path = tmp_path / "store"
    name, other = "float32.(3, 1741)", "float32.(2049,)"
    with made(path, spill=torch.float32) as store, engine.Engine(store) as updates:
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
        # The failed sum dropped the gradient of `name`. The gradient of `other` still exists.
        with pytest.raises(UsageError, match="no gradient of"):
            updates.spilled(name)
        assert updates.spilled(other) == (False, 2049 << 298)
        updates.spill(name, values)
        updates.update_spilled(name, engine.Adam(step=1))
        updates.commit(1)


# --- formats of state --------------------------------------------------------------------------------

# Pairs of a format and the dtype of the values.
FORMATS = [
    ("bf16", torch.float32),
    ("8bit", torch.float32),
    ("bf16", torch.float16),
    ("8bit", torch.bfloat16),
    ("compact", torch.bfloat16),
    ("compact bf16", torch.bfloat16),
    ("compact 8bit", torch.bfloat16),
    ("stochastic", torch.bfloat16),
    ("stochastic bf16", torch.float16),
    ("stochastic 8bit", torch.bfloat16),
]
NUMEL = 3 * 4096 + 77


def _noise(seed, numel=NUMEL):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=made) * torch.rand(numel, generator=made) ** 4


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (13,), (3, 1741)])
def test_encoded_compact_state_defaults_to_values_and_zeros(shape):
    values = torch.randn(shape).bfloat16()
    state = encoded(values, {}, "compact")
    assert all(tensor.shape == values.shape and not tensor.any() for tensor in state.values())
    assert torch.equal(engine.decode_state(values, state, "compact")["master"], values.float())


@pytest.mark.parametrize(("form", "dtype"), FORMATS)
def test_fill_converts_float32_state_to_the_stored_format(tmp_path, form, dtype):
    master, first, second = _noise(1), _noise(2), _noise(3).square()
    values = master.to(dtype)
    given = {"exp_avg": first, "exp_avg_sq": second}
    if dtype != torch.float32 and not form.startswith("stochastic"):
        given["master"] = master
    likes = engine.state_tensors(values, form)
    record = engine.Record(name="weight", values=values, state=likes, format=form)
    with engine.Store.create(tmp_path / "store", [record], chunk_elements=4096) as store:
        with engine.Engine(store) as updates:
            updates.fill("weight", values, given, step=3)
            updates.commit(1)
            if "rest" in likes:
                updates.fill("weight", values * 2, given, step=4)
                with pytest.raises(ConfigError, match="not its master weight rounded"):
                    updates.commit(2)
                updates.discard()
            _, state = store.read("weight")
            updates.fill("weight", values, {}, step=0)
            updates.commit(2)
            # `fill` also takes state in the stored format.
            updates.fill("weight", values, state, step=4)
            updates.commit(3)
        found, kept = store.read("weight")
        assert same_bits(found, values)
        assert same_states(kept, state)
        back = engine.decode_state(found, kept, form)
    wanted = values.float() if "master" not in given else master
    assert torch.equal(back["master"], wanted)
    if "bf16" in form:
        assert torch.equal(back["exp_avg"], first.bfloat16().float())
        assert torch.equal(back["exp_avg_sq"], second.bfloat16().float())
    elif "8bit" in form:
        for name, tensor, signed in (("exp_avg", first, True), ("exp_avg_sq", second, False)):
            codes, absmax = blockwise.quantized(tensor, signed=signed)
            assert torch.equal(kept[name], codes)
            assert torch.equal(kept[f"{name}_absmax"], absmax)
            assert torch.equal(back[name], blockwise.dequantized(codes, absmax, signed=signed))
    else:
        assert torch.equal(back["exp_avg"], first)
        assert torch.equal(back["exp_avg_sq"], second)


def test_compact_state_of_a_transposed_tensor_keeps_strides_and_values():
    values = _noise(1, 60 * 50).view(60, 50).t().bfloat16()
    master = _noise(1, 60 * 50).view(60, 50).t()
    for form in ("compact", "compact bf16", "compact 8bit"):
        state = encoded(values, {"master": master, "exp_avg": master}, form)
        assert state["rest"].stride() == values.stride()
        back = engine.decode_state(values, state, form)
        assert torch.equal(back["master"], master)
        codes, absmax = blockwise.quantized(master.t().reshape(-1), signed=True)
        if form == "compact 8bit":
            assert torch.equal(state["exp_avg"].t().reshape(-1), codes)
            assert torch.equal(back["exp_avg"].t().reshape(-1), blockwise.dequantized(codes, absmax, signed=True))


def _refused(call, *words):
    with pytest.raises(ConfigError) as raised:
        call()
    assert all(word in str(raised.value) for word in words), raised.value


def test_state_formats_reject_values_and_state_that_do_not_fit(tmp_path):
    values = _noise(1)
    _refused(lambda: engine.state_tensors(values, "compact bf16"), "float32", "compact bf16")
    _refused(lambda: engine.state_tensors(values, "4bit"), "4bit")
    _refused(lambda: encoded(values, {"exp_avg": values.double()}, "bf16"), "is float64 of shape")
    one_off = {"master": torch.cat([values[:-1].bfloat16().float(), values[-1:].bfloat16().float() + 1])}
    negative, other = {"master": values, "exp_avg_sq": -values.abs()}, {"momentum": values}
    turned = {"master": values.view(-1, 1)}
    why = f'element {NUMEL - 1} of "it" is not its master weight rounded'
    for form in ("compact", "compact bf16", "compact 8bit"):
        for given, words in (
            *((one_off, why), (negative, "negative"), (other, "no state tensor called 'momentum'")),
            (turned, f"is float32 of shape [{NUMEL}, 1]"),
        ):
            _refused(partial(encoded, values.bfloat16(), given, form), words)
        _refused(partial(engine.decode_state, values.bfloat16(), other, form), "are not in the format")
        _refused(partial(encoded, values.half(), {}, form), "values of float16, which the format")
    _refused(
        lambda: engine.decode_state(values[::2], encoded(values[::2].clone(), {}, "bf16"), "bf16"), "must not have gaps"
    )
    state = encoded(values, {}, "bf16")
    _refused(lambda: engine.decode_state(values, state, "8bit"), "8bit")
    wrong = engine.Record(name="weight", values=values, state=state, format="8bit")
    _refused(lambda: engine.Store.create(tmp_path / "wrong", [wrong]), "8bit")
    record = engine.Record(name="weight", values=values, state=state, format="bf16")
    with filled(tmp_path / "store", [record]) as store, engine.Engine(store) as updates:
        momentum = engine.Momentum(momentum=0.9, step=1)
        _refused(lambda: updates.update("weight", values, momentum), "momentum")
        again = engine.Record(name="weight", values=values, state=encoded(values, {}, "8bit"), format="8bit")
    _refused(lambda: engine.Store.create(tmp_path / "store", [again], existing="resume"), "weight")
