"""Tests whole training runs through the fake device against the same runs in memory."""

import dataclasses

import pytest
from parity.harness import Mode, check, reference
from parity.zoo_loops import LOOPS, OPTIMIZERS
from parity.zoo_plain import PLAIN
from parity.zoo_transformers import TRANSFORMERS

import memascend
from memascend import engine

CASES = {case.name: case for case in [*LOOPS, *OPTIMIZERS, *PLAIN, *TRANSFORMERS]}


def same_bits(case, mode, folder, fake):
    """With the smallest budget of the device, as it is named where there is too little."""
    reference(case, mode.threads)

    def on_device(budget):
        (folder / str(budget)).mkdir()
        check(dataclasses.replace(case, options={**case.options, "device_memory": budget}), mode, folder / str(budget))

    with pytest.raises(memascend.BudgetError) as refused:
        on_device(1)
    on_device(refused.value.smallest)
    assert fake.brought, "nothing went by way of the device: this test could not fail"


@pytest.mark.parametrize(("name", "gradients"), [("qwen2-tied-bf16", "fused"), ("fp16-clip", "ssd")])
def test_what_is_held_reaches_the_device_with_the_same_bits(name, gradients, tmp_path, fake, monkeypatch):
    held = []
    hold = engine.Store.hold

    def noted(store, names, **how):
        held.extend(names)
        hold(store, names, **how)

    monkeypatch.setattr(engine.Store, "hold", noted)
    # A budget of the host that holds everything, while the device has room for less.
    same_bits(CASES[name], Mode(gradients, "large", 1), tmp_path, fake)
    assert held


# One of each kind of difficulty; all of them are in `test_parity`.
@pytest.mark.parametrize(
    ("name", "gradients"),
    [("qwen2-tied-bf16", "fused"), ("checkpointed", "fused"), ("fp16-clip", "ssd"), ("accumulate-tied", "ram")],
)
def test_the_same_bits(name, gradients, tmp_path, fake):
    same_bits(CASES[name], Mode(gradients, "smallest", 1), tmp_path, fake)
