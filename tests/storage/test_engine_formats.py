"""Tests formats of state: nothing is lost, state goes in and out, and what does not fit is refused."""

from functools import partial

import pytest
import torch
from support import blockwise
from support.stores import filled

from benchmarks.reduced import encoded
from memascend import engine
from memascend.errors import ConfigError

# Format, dtype of the values.
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


def _bytes(*tensors):
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (13,), (3, 1741)])
def test_what_is_not_given_begins_as_the_values_and_zeros(shape):
    values = torch.randn(shape).bfloat16()
    state = encoded(values, {}, "compact")
    assert all(tensor.shape == values.shape and not tensor.any() for tensor in state.values())
    assert torch.equal(engine.decode_state(values, state, "compact")["master"], values.float())


@pytest.mark.parametrize(("form", "dtype"), FORMATS)
def test_fill_takes_float32(tmp_path, form, dtype):
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
                with pytest.raises(ConfigError, match="not its master rounded"):
                    updates.commit(2)
                updates.discard()
            _, state = store.read("weight")
            updates.fill("weight", values, {}, step=0)
            updates.commit(2)
            # As it lies on storage it may be given, too.
            updates.fill("weight", values, state, step=4)
            updates.commit(3)
        found, kept = store.read("weight")
        assert _bytes(found, *kept.values()) == _bytes(values, *state.values())
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


def test_values_in_another_order_of_dimensions_come_back():
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


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    values = _noise(1)
    _refused(lambda: engine.state_tensors(values, "compact bf16"), "float32", "compact bf16")
    _refused(lambda: engine.state_tensors(values, "4bit"), "4bit")
    _refused(lambda: encoded(values, {"exp_avg": values.double()}, "bf16"), "is float64 of shape")
    one_off = {"master": torch.cat([values[:-1].bfloat16().float(), values[-1:].bfloat16().float() + 1])}
    negative, other = {"master": values, "exp_avg_sq": -values.abs()}, {"momentum": values}
    turned = {"master": values.view(-1, 1)}
    why = f'element {NUMEL - 1} of "it" is not its master rounded'
    for form in ("compact", "compact bf16", "compact 8bit"):
        for given, words in (
            *((one_off, why), (negative, "negative"), (other, "no state called 'momentum'")),
            (turned, f"is float32 of shape [{NUMEL}, 1]"),
        ):
            _refused(partial(encoded, values.bfloat16(), given, form), words)
        _refused(partial(engine.decode_state, values.bfloat16(), other, form), "is not in the format")
        _refused(partial(encoded, values.half(), {}, form), "no state in the format")
    _refused(lambda: engine.decode_state(values[::2], encoded(values[::2].clone(), {}, "bf16"), "bf16"), "with gaps")
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
