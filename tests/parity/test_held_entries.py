"""Tests that a run has the same bits whether none, some or all of its state is held in memory."""

from __future__ import annotations

import pytest
import torch
from parity import loops
from parity.harness import Case, Run, differences, last_of, play, reference, require_reference
from parity.test_resume import in_one_go, steps_from
from parity.zoo_loops import BF16, FP16, stack
from parity.zoo_plain import Rooted, Stack, classified, convolutions, images, squares, vectors

import memascend
from memascend.planning.options import Options
from memascend.run.decision import planned


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


CASES = [
    stack("held-fp32", in_one_go),
    stack("held-bf16", in_one_go, model=lambda: Stack(tied=True), dtype=BF16),
    stack("held-sgd", in_one_go, optimizer=sgd),
    stack("held-sgd-bf16", in_one_go, optimizer=sgd, dtype=BF16),
    stack("held-clipped", in_one_go, gradients=("ssd", "ram"), options={"max_grad_norm": loops.CLIPPED}),
    stack("held-accumulates", loops.accumulates, gradients=("ssd",), dtype=BF16),
    stack("held-drops", loops.drops_some, dtype=BF16),
    stack("held-fails", loops.fails_and_goes_on),
    stack("held-overflows", loops.scales, dtype=FP16, gradients=("ssd",)),
    Case(name="held-rooted", model=Rooted, batches=vectors(), loss=squares, loop=in_one_go),
    Case(name="held-buffers", model=convolutions, batches=images, loss=classified, loop=in_one_go),
]
PARTS = ("none", "some", "all")
# What a discarded update had overwritten is read again.
DISCARDS = ("held-drops", "held-fails", "held-overflows")


def budget_of(case, part, **options):
    """The budget at which this part of the state is held."""
    model = case.model().to(case.dtype)
    plan = planned(model, case.optimizer(model), Options(host_memory="1GiB", **options, **case.options)).plan
    assert plan.all_held > plan.ample
    return {"none": plan.comfortable, "some": (plan.ample + plan.all_held) // 2, "all": plan.all_held}[part]


def held_part(optimizer):
    held, trained = len(optimizer.plan.held), len(optimizer.param_groups[0]["params"])
    return "none" if not held else "all" if held >= trained else "some"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_what_is_held_has_the_bits_of_what_is_read(case, part, tmp_path):
    options = {"storage": tmp_path / "run.store", "gradients": case.gradients[0]}
    budget = budget_of(case, part, **options)
    reports = []

    def take(model, original):
        made = memascend.offload(model, original, host_memory=budget, **options, **case.options)
        assert held_part(made[1]) == part
        return made

    class Read:
        def __init__(self, model, optimizer):
            self.optimizer, self.real = optimizer, memascend.materialized(model)
            reports.append(optimizer.report())

        def __enter__(self):
            self.real.__enter__()

        def __exit__(self, *error):
            self.real.__exit__(*error)
            self.optimizer.close()

    outcome = play(case, 1, take, read=Read)
    assert differences(reference(case, 1), outcome) == []
    (report,) = reports
    assert report.peak <= budget
    reads = {kind: report.read[kind] for kind in ("values", "values, update", "state")}
    if part == "none":
        assert report.held == 0
        assert reads["values"] > 0
        return
    assert report.held > 0
    assert "kept" in str(report)
    if part == "some":
        assert sum(reads.values()) > 0
    elif case.name not in DISCARDS:
        # Not even once: they are held as they are written first.
        assert reads == {"values": 0, "values, update": 0, "state": 0}


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram"])
def test_ten_resumes_with_other_budgets_end_in_the_bits_of_one_run(gradients, tmp_path):
    case = stack(
        f"held-resumed-{gradients}", lambda run: steps_from(run, 0, 10), model=lambda: Stack(tied=True), dtype=BF16
    )
    options = {"storage": tmp_path / "run.store", "gradients": gradients}
    batches, records = case.batches(torch.Generator().manual_seed(2)), []
    for step in range(10):
        torch.manual_seed(1)
        model = case.model().to(case.dtype)
        budget = budget_of(case, PARTS[step * 7 % 3], **options)
        original = case.optimizer(model)
        model, optimizer = memascend.offload(model, original, host_memory=budget, existing="resume", **options)
        assert optimizer.steps == step
        steps_from(Run(model, optimizer, original, batches, case.loss, records), step, step + 1)
        # Staged and dropped: what is held then is of no commit.
        optimizer.backward(case.loss(model, batches[0]))
        if step == 9:
            optimizer.zero_grad()
            last_state = last_of(model, optimizer)
        optimizer.close()
    require_reference(case, records, last_state)


def test_a_weight_that_is_written_in_place_is_refused_and_read_anew(tmp_path):
    case = stack("held-in-place", in_one_go)
    budget = budget_of(case, "all", storage=tmp_path / "run.store")
    model = case.model()
    model, optimizer = memascend.offload(
        model, case.optimizer(model), storage=tmp_path / "run.store", host_memory=budget
    )
    with optimizer:
        batch = case.batches(torch.Generator().manual_seed(2))[0]
        before = case.loss(model, batch).item()
        module = next(module for module in model.modules() if list(module.parameters(recurse=False)))

        def scribble(module, *_):
            with torch.no_grad():
                next(module.parameters(recurse=False)).mul_(2)

        hook = module.register_forward_pre_hook(scribble)
        optimizer.backward(case.loss(model, batch))
        with pytest.raises(memascend.UsageError):
            optimizer.step()
        hook.remove()
        optimizer.zero_grad()
        assert case.loss(model, batch).item() == before
