"""Tests state formats: the format of each parameter, rejected options, changes of the format, and Muon with bf16."""

import itertools
import json

import pytest
import torch
from parity.reference import Reference
from support.bits import same_bits, same_states
from support.chains import chain, everything, offloaded, step, train

import memascend
from memascend.optim.state import StateFormats

adamw = torch.optim.AdamW
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def parameters(*dtypes, numel=8192):
    return [torch.nn.Parameter(torch.ones(numel, dtype=dtype)) for dtype in dtypes]


def sgd(given, **options):
    return torch.optim.SGD(given, lr=0.1, **options)


# The keys are `state`, `rounding`, whether there are master weights, and the parameter's dtype. The values are the
# format of the state, None if the optimizer's own state is stored, or words of the error. AdamW and SGD with momentum
# have the same formats and errors.
KEPT = {
    ("bf16", "nearest", True, FP32): "bf16",
    ("bf16", "nearest", True, BF16): "compact bf16",
    ("bf16", "nearest", True, FP16): "bf16",
    ("8bit", "nearest", True, FP32): "8bit",
    ("8bit", "nearest", True, BF16): "compact 8bit",
    ("8bit", "nearest", True, FP16): "8bit",
    ("bf16", "nearest", False, FP32): "bf16",
    ("8bit", "nearest", False, FP32): "8bit",
    ("bf16", "nearest", False, BF16): "rounding='stochastic'",
    ("8bit", "nearest", False, FP16): "rounding='stochastic'",
    ("fp32", "nearest", False, BF16): "rounding='stochastic'",
    (None, "stochastic", False, BF16): "stochastic",
    (None, "stochastic", False, FP16): "stochastic",
    ("fp32", "stochastic", False, BF16): "stochastic",
    ("bf16", "stochastic", False, BF16): "stochastic bf16",
    ("bf16", "stochastic", False, FP16): "stochastic bf16",
    ("8bit", "stochastic", False, BF16): "stochastic 8bit",
    ("8bit", "stochastic", False, FP16): "stochastic 8bit",
    (None, "stochastic", False, FP32): "bfloat16 and float16",
    ("bf16", "nearest", True, FP64): "torch.float64",
    ("8bit", "nearest", True, FP64): "torch.float64",
    (None, "stochastic", False, FP64): "torch.float64",
    **{(state, "nearest", masters, dtype): None
       for state, masters, dtype in itertools.product((None, "fp32"), (True, False), (FP32, BF16, FP16, FP64))
       if masters or state is None or dtype in (FP32, FP64)},
}  # fmt: skip


@pytest.mark.parametrize("make", [adamw, lambda given: sgd(given, momentum=0.9)], ids=["adamw", "sgd"])
@pytest.mark.parametrize(("combination", "wanted"), KEPT.items(), ids=str)
def test_each_option_combination_gives_its_state_format_or_error(combination, wanted, make):
    state, rounding, masters, dtype = combination
    (parameter,) = given = parameters(dtype)
    formats = StateFormats(state=state, stochastic=rounding == "stochastic")
    master_dtype = FP32 if masters else None
    if wanted is not None and not wanted.startswith(("bf16", "8bit", "compact", "stochastic")):
        with pytest.raises(memascend.ConfigError, match=wanted):
            formats.of(make(given), master_dtype)
        return
    assert formats.of(make(given), master_dtype).get(id(parameter)) == wanted


def test_8bit_state_keeps_fp32_for_small_parameters_and_embeddings():
    small, embedding, matrix = given = [torch.nn.Parameter(torch.ones(size)) for size in (4095, 8192, 4096)]
    found = StateFormats(state="8bit", whole=frozenset([id(embedding)])).of(adamw(given), FP32)
    assert [found[id(one)] for one in (small, embedding, matrix)] == ["", "", "8bit"]
    found = StateFormats(state="bf16", whole=frozenset([id(embedding)])).of(adamw(given), FP32)
    assert set(found.values()) == {"bf16"}
    # The shard of a rank has the format of the whole parameter, which has 8190 elements here.
    found = StateFormats(state="8bit", elements={id(small): 8190}).of(adamw(given), FP32)
    assert found[id(small)] == "8bit"


def test_bf16_state_continues_from_an_existing_momentum(tmp_path):
    plain, model = chain(), chain()
    theirs, own = (sgd(of.parameters(), momentum=0.9) for of in (plain, model))
    step(plain, theirs)
    step(model, own)
    model, optimizer = memascend.offload(model, own, storage=tmp_path / "store", state="bf16")
    with optimizer:
        step(plain, theirs)
        step(model, optimizer)
        wanted = theirs.state[plain[0].weight]["momentum_buffer"]
        found = optimizer.state_of(model[0].weight)["momentum_buffer"]
        assert (found - wanted).abs().max() < 0.01 * wanted.abs().max()


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (torch.optim.Adagrad, "Adagrad"),
        (lambda given: torch.optim.RMSprop(given, momentum=0.9), "RMSprop"),
        (sgd, "SGD without momentum"),
        (lambda given: sgd([{"params": given[:1], "momentum": 0.9}, {"params": given[1:]}]), "SGD without momentum"),
        (type("Mine", (torch.optim.AdamW,), {}), "Mine"),
    ],
)
def test_state_error_names_the_unsupported_optimizer(optimizer, named, state):
    with pytest.raises(memascend.ConfigError, match=f"state='{state}'.*{named}.*remove this option"):
        StateFormats(state=state).of(optimizer(parameters(FP32, FP32)), FP32)


def test_bf16_state_rejects_amsgrad():
    with pytest.raises(memascend.ConfigError, match="amsgrad"):
        StateFormats(state="bf16").of(adamw(parameters(FP32), amsgrad=True), FP32)


# --- runs that resume a store or start from a checkpoint, with a different format -----------------

FORMATS = (None, "bf16", "8bit")
LOSSES = {
    ("fp32", "bf16"): "rounded from 32 bits to bfloat16",
    ("fp32", "8bit"): "rounded from 32 bits to 8 bits",
    ("bf16", "8bit"): "rounded from bfloat16 to 8 bits",
    ("8bit", "bf16"): "rounded from 8 bits to bfloat16",
    ("bf16", "fp32"): "nothing is lost",
    ("8bit", "fp32"): "nothing is lost",
}


def model(seed=0):
    torch.manual_seed(seed)
    # The transposed weight is not row-major. The blocks of its 8-bit state follow the order of the elements in memory.
    made = torch.nn.Sequential(torch.nn.Linear(70, 90), torch.nn.Tanh(), torch.nn.Linear(90, 70, bias=False))
    made[2].weight = torch.nn.Parameter(torch.randn(90, 70).mul_(0.1).t())
    return made.bfloat16()


def begin(path, state, values=0, **options):
    return offloaded(path, model(values), host_memory="64MiB", state=state, **options)


@pytest.mark.parametrize("before", FORMATS)
def test_resume_in_another_format_is_rejected_and_changes_nothing(tmp_path, before):
    trained, optimizer = begin(tmp_path / "store", before)
    train(trained, optimizer, range(2))
    left = everything(trained, optimizer)
    optimizer.close()
    for after in FORMATS:
        if after == before:
            continue
        with pytest.raises(memascend.ConfigError) as refused:
            begin(tmp_path / "store", after, existing="resume")
        words = str(refused.value)
        assert f"state={before!r}" in words
        assert "checkpoint=" in words
    trained, optimizer = begin(tmp_path / "store", before, existing="resume")
    with optimizer:
        assert optimizer.steps == 2
        assert same_states(everything(trained, optimizer), left)


@pytest.mark.parametrize(("state", "options"), [("bf16", {"seed": 5}), ("8bit", {})])
def test_start_from_a_checkpoint_continues_with_the_bits_of_its_run(tmp_path, state, options):
    trained, optimizer = begin(tmp_path / "one", state, **options)
    train(trained, optimizer, range(3))
    optimizer.save(tmp_path / "saved")
    expected = train(trained, optimizer, range(3, 6))
    left = everything(trained, optimizer)
    optimizer.close()
    # The new run has the state format of the checkpoint, so it must not warn. pytest turns a warning into an error.
    trained, optimizer = begin(tmp_path / "two", state, 1, checkpoint=tmp_path / "saved")
    assert all(map(same_bits, expected, train(trained, optimizer, range(3, 6))))
    assert same_states(everything(trained, optimizer), left)
    optimizer.close()
    manifest = json.loads((tmp_path / "saved" / "memascend" / "manifest.json").read_text())
    assert (manifest["version"], manifest.get("seed")) == (2, options.get("seed"))


@pytest.mark.parametrize("pair", LOSSES, ids=" to ".join)
def test_checkpoint_in_another_format_converts_and_warns_of_the_loss(tmp_path, pair):
    one, other = (None if state == "fp32" else state for state in pair)
    trained, optimizer = begin(tmp_path / "one", one)
    train(trained, optimizer, range(3))
    optimizer.save(tmp_path / "saved")
    before = everything(trained, optimizer)
    optimizer.close()
    with pytest.warns(UserWarning, match=LOSSES[pair]):
        trained, optimizer = begin(tmp_path / "two", other, 1, checkpoint=tmp_path / "saved")
    after = everything(trained, optimizer)
    assert optimizer.steps == 3
    for name, given in before.items():
        if "exp_avg" in name and "nothing" not in LOSSES[pair]:
            assert torch.allclose(given, after[name], rtol=0.02, atol=float(given.abs().max()) * 0.01), name
        else:
            assert same_bits(given, after[name]), name
    train(trained, optimizer, range(3, 5))
    optimizer.close()


def test_dropped_master_weights_and_an_ignored_seed_give_warnings(tmp_path):
    trained, optimizer = begin(tmp_path / "one", "bf16")
    train(trained, optimizer, range(2))
    optimizer.save(tmp_path / "saved")
    optimizer.close()
    options = {"checkpoint": tmp_path / "saved", "master_dtype": None, "rounding": "stochastic"}
    with pytest.warns(UserWarning, match="fp32 master weights are dropped"):
        trained, optimizer = begin(tmp_path / "two", "bf16", **options)
    with optimizer:
        train(trained, optimizer, range(2, 4))
    with pytest.warns(UserWarning, match="the stored seed 0 is used, not 9"):
        begin(tmp_path / "one", "bf16", existing="resume", seed=9)[1].close()


# --- Muon: compact master weights, a momentum of 16 bits, bytes moved, errors ------------------------------


def matrices(dtype):
    torch.manual_seed(0)
    shapes = 2 * [(200, 136), (136, 200)]
    return torch.nn.Sequential(*(torch.nn.Linear(*shape, bias=False) for shape in shapes)).to(dtype)


def with_muon(storage, dtype=torch.bfloat16, **options):
    return offloaded(storage, matrices(dtype), torch.optim.Muon, 0.02, **options)


def in_memory(dtype, steps):
    """Trains in memory and rounds the momenta after each step.

    Returns values, master weights and momenta.
    """
    model = matrices(dtype)
    optimizer = Reference(torch.optim.Muon(model.parameters(), lr=0.02), loss_scale=1.0)
    masters = list(optimizer.masters.values())
    for index in range(steps):
        step(model, optimizer, index)
        for kept in optimizer.inner.state.values():
            kept["momentum_buffer"].copy_(kept["momentum_buffer"].bfloat16())
    return [*model.parameters(), *masters, *(optimizer.inner.state[one]["momentum_buffer"] for one in masters)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_momentum_of_16_bits_is_rounded_after_each_step(tmp_path, dtype):
    scale = {"loss_scale": 1.0} if dtype == torch.float16 else {}
    model, optimizer = with_muon(tmp_path / "store", dtype, state="bf16", **scale)
    with optimizer:
        train(model, optimizer, range(3))
        states = [optimizer.state_of(one) for one in model.parameters()]
        found = [*model.state_dict().values(), *(one[name] for name in ("master", "momentum_buffer") for one in states)]
        assert all(map(same_bits, found, in_memory(dtype, 3)))


@pytest.mark.parametrize(("state", "most"), [(None, 18.0), ("bf16", 14.0)])
def test_muon_step_moves_at_most_18_or_14_bytes_per_element(tmp_path, state, most):
    """The limit also includes the padding to whole pages, which is large in proportion to small parameters."""
    model, optimizer = with_muon(tmp_path / "store", gradients="fused", state=state)
    with optimizer:
        train(model, optimizer, range(2))
        before = optimizer.report()
        train(model, optimizer, range(2, 4))
        after = optimizer.report()
        kinds = ("values", "values, update", "state", "gradients")
        moved = [sum(one.read.get(kind, 0) + one.written.get(kind, 0) for kind in kinds) / 2 for one in (before, after)]
        pages = 4096 * 2 * 2 * len(list(model.parameters()))
        assert moved[1] - moved[0] <= most * sum(one.numel() for one in model.parameters()) + pages


def test_muon_rejects_8bit_state_and_bf16_state_without_masters(tmp_path):
    for options in ({"state": "8bit"}, {"state": "bf16", "master_dtype": None}):
        with pytest.raises(memascend.ConfigError, match="state="):
            with_muon(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()
