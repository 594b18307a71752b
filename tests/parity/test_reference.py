"""Tests the reference itself: torch's fused update equals our kernel, and a difference is noticed."""

import dataclasses

import pytest
import torch
from parity.harness import differences, in_ram, reference
from parity.reference import KernelInRam
from parity.zoo_compiled import COMPILED
from parity.zoo_loops import LOOPS, OPTIMIZERS
from parity.zoo_plain import PLAIN
from parity.zoo_transformers import TRANSFORMERS

OTHERS = ("sgd", "adagrad", "rmsprop", "nadam", "radam", "adafactor", "sparse")
# Loops that are made for something the kernel in RAM has not, or has in another way.
BY_TORCH = {"adam", "adam-bf16", "own-dtype", *(case.name for case in OPTIMIZERS if case.name.startswith(OTHERS))}
CASES = [case for case in (*PLAIN, *TRANSFORMERS, *LOOPS, *OPTIMIZERS, *COMPILED) if case.name not in BY_TORCH]
QUICK = {"odd-mlp", "odd-mlp-bf16", "stack-tied-bf16", "idle-experts", "channels-last"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_the_reference_equals_the_kernel_in_ram(case, threads):
    assert differences(reference(case, threads), in_ram(case, threads, KernelInRam)) == []


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in OPTIMIZERS if case.name in BY_TORCH])
def test_other_optimizers_run_in_ram(case):
    reference(case, 1)


def test_every_kind_of_difference_is_noticed():
    case = next(case for case in PLAIN if case.name == "rooted")
    expected = reference(case, 1)
    assert differences(expected, expected) == []

    def changed(**fields):
        return differences(expected, dataclasses.replace(expected, **fields))

    weights = {**expected.weights, "shift": torch.nextafter(expected.weights["shift"], torch.tensor(9.0))}
    assert changed(weights=weights)[0].startswith("parameter shift: 32 of 32 elements")
    assert "buffer seen" in changed(buffers={"seen": expected.buffers["seen"] + 1})[0]
    assert changed(buffers={}) == ["missing: buffer seen"]
    assert changed(records=[*expected.records[:-1], expected.records[-1] + 1e-6])[0].startswith("record 3")
    state = {**expected.state, "unused": {"exp_avg": torch.zeros(5)}}
    assert changed(state=state) == ["not in the reference: state of unused: exp_avg"]
    assert changed(random=expected.random + 1)[0].startswith("random numbers drawn")
