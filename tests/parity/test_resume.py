"""Tests training that is closed and resumed from its store: the bits of one run."""

from __future__ import annotations

import pytest
import torch
from parity.harness import Case, Run, last_of, require_reference
from parity.zoo_loops import BF16, stack
from parity.zoo_plain import Stack, Turned, squares, vectors

import memascend

STEPS = 6


def steps_from(run, first, last):
    for index in range(first, last):
        run.optimizer.backward(run.loss(index))
        run.optimizer.step()
        run.optimizer.zero_grad()


def in_one_go(run):
    steps_from(run, 0, STEPS)


CASES = [
    Case(name="resume-turned", model=Turned, batches=vectors(), loss=squares, loop=in_one_go),
    stack("resume-bf16", in_one_go, model=lambda: Stack(tied=True), dtype=BF16),
]


@pytest.mark.parametrize("existing", ["closed", "dropped in the middle of a step"])
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_a_run_that_was_closed_goes_on(case, existing, tmp_path):
    options = {"storage": tmp_path / "run.store", "host_memory": "64MiB", "existing": "resume", **case.options}
    batches = case.batches(torch.Generator().manual_seed(2))
    records = []
    for first, last in ((0, 1), (1, 4), (4, STEPS)):
        # From the second time on the model's own values are others, and ignored.
        torch.manual_seed(1 if first == 0 else first + 100)
        model = case.model().to(case.dtype)
        original = case.optimizer(model)
        model, optimizer = memascend.offload(model, original, **options)
        assert optimizer.steps == first
        run = Run(model, optimizer, original, batches, case.loss, records)
        steps_from(run, first, last)
        if existing != "closed" and last != STEPS:
            optimizer.backward(case.loss(model, run.batches[0]))  # staged, and dropped
        if last == STEPS:
            last_state = last_of(model, optimizer)
        optimizer.close()
    require_reference(case, records, last_state)
