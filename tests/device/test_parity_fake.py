"""Tests whole training runs through the fake device against the same runs in memory."""

import dataclasses

import pytest
from parity.harness import BUDGETS_MAX, Mode, check, reference
from parity.zoo_loops import LOOPS, OPTIMIZERS
from parity.zoo_plain import PLAIN
from parity.zoo_transformers import TRANSFORMERS

import memascend
from memascend import engine

CASES = {case.name: case for case in [*LOOPS, *OPTIMIZERS, *PLAIN, *TRANSFORMERS]}
# One of each kind of difficulty; the others are slow.
CHOSEN = {
    "qwen2-tied-bf16": Mode("fused", "smallest", 1),
    "checkpointed": Mode("fused", "smallest", 1),
    "fp16-clip": Mode("ssd", "smallest", 1),
    "accumulate-tied": Mode("ram", "smallest", 1),
}


def cases():
    found = []
    for name, case in CASES.items():
        for gradients in case.gradients:
            mode = Mode(gradients, "smallest", 1)
            marks = [*case.marks, *([] if CHOSEN.get(name) == mode else [pytest.mark.slow])]
            found.append(pytest.param(case, mode, id=f"{name}-{mode}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "gradients"), [("qwen2-tied-bf16", "fused"), ("fp16-clip", "ssd")])
def test_what_is_held_reaches_the_device_with_the_same_bits(name, gradients, tmp_path, fake, monkeypatch):
    held = []
    hold = engine.Store.hold

    def noted(store, names, **how):
        held.extend(names)
        hold(store, names, **how)

    monkeypatch.setattr(engine.Store, "hold", noted)
    # A budget of the host that holds everything, while the device has room for less.
    test_the_same_bits(CASES[name], Mode(gradients, "large", 1), tmp_path, fake)
    assert held


@pytest.mark.parametrize(("case", "mode"), cases())
def test_the_same_bits(case, mode, tmp_path, fake):
    reference(case, mode.threads)
    budget = 1
    for attempt in range(BUDGETS_MAX + 1):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        options = {**case.options, "device_memory": budget}
        try:
            check(dataclasses.replace(case, options=options, learns_budget=False), mode, folder)
        except memascend.BudgetError as error:
            # The smallest, first; then what a first step showed that no plan could know.
            if attempt and not case.learns_budget:
                raise
            budget = error.smallest
            continue
        break
    else:
        pytest.fail("the budget was still too small")
    assert fake.brought, "nothing went by way of the device: this test could not fail"
