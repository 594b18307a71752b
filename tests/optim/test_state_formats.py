"""Tests in which format the state of each parameter is kept, and what is refused by name."""

import itertools

import pytest
import torch
from support.chains import chain, step

import memascend
from memascend.optim.state import StateFormats

adamw = torch.optim.AdamW
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def parameters(*dtypes, numel=8192):
    return [torch.nn.Parameter(torch.ones(numel, dtype=dtype)) for dtype in dtypes]


def sgd(given, **options):
    return torch.optim.SGD(given, lr=0.1, **options)


# Of AdamW and of SGD with momentum: (state, rounding, masters, dtype) and the format, or what the error names.
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
def test_each_combination_has_its_format_or_its_reason(combination, wanted, make):
    state, rounding, masters, dtype = combination
    (parameter,) = given = parameters(dtype)
    formats = StateFormats(state=state, stochastic=rounding == "stochastic")
    master_dtype = FP32 if masters else None
    if wanted is not None and not wanted.startswith(("bf16", "8bit", "compact", "stochastic")):
        with pytest.raises(memascend.ConfigError, match=wanted):
            formats.of(make(given), master_dtype)
        return
    assert formats.of(make(given), master_dtype).get(id(parameter)) == wanted


def test_small_parameters_and_embeddings_keep_32_bits_beside_8():
    small, embedding, matrix = given = [torch.nn.Parameter(torch.ones(size)) for size in (4095, 8192, 4096)]
    found = StateFormats(state="8bit", whole=frozenset([id(embedding)])).of(adamw(given), FP32)
    assert [found[id(one)] for one in (small, embedding, matrix)] == ["", "", "8bit"]
    found = StateFormats(state="bf16", whole=frozenset([id(embedding)])).of(adamw(given), FP32)
    assert set(found.values()) == {"bf16"}
    # Rows of a rank have the format of the whole parameter.
    found = StateFormats(state="8bit", elements={id(small): 8190}).of(adamw(given), FP32)
    assert found[id(small)] == "8bit"


def test_a_momentum_that_is_there_already_is_gone_on_with(tmp_path):
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
def test_other_optimizers_are_refused_by_name(optimizer, named, state):
    with pytest.raises(memascend.ConfigError, match=f"state='{state}'.*{named}.*leave it out"):
        StateFormats(state=state).of(optimizer(parameters(FP32, FP32)), FP32)


def test_a_third_moment_is_refused():
    with pytest.raises(memascend.ConfigError, match="amsgrad"):
        StateFormats(state="bf16").of(adamw(parameters(FP32), amsgrad=True), FP32)
