"""Tests training with moments of other formats: the bits of the same update in RAM, in any budget and loop."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from parity.harness import PARTS, Run, check, combined, copies, differences, ram_tier_budget, reference
from parity.test_resume import in_one_go, steps_from
from parity.zoo_formats import FORMATS, mixed
from parity.zoo_loops import BF16

import memascend


@combined(FORMATS)
def test_a_format_has_the_bits_of_ram(case, mode, tmp_path):
    check(case, mode, tmp_path)


RESUMED = [
    mixed("resumed-bf16", "bf16", in_one_go, dtype=BF16),
    mixed("resumed-8bit", "8bit", in_one_go, dtype=BF16),
    mixed("resumed-stochastic", "bf16", in_one_go, dtype=BF16, rounding="stochastic"),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in RESUMED])
def test_resumes_with_other_budgets_end_in_the_bits_of_one_run(case, tmp_path):
    where = {"storage": tmp_path / "run.store"}
    options = {name: value for name, value in case.options.items() if name != "seed"}
    batches, records = case.batches(torch.Generator().manual_seed(2)), []
    for step in range(6):
        torch.manual_seed(1)
        model = case.model().to(case.dtype)
        budget = ram_tier_budget(case, PARTS[step * 7 % 3], **where)
        original = case.optimizer(model)
        # From the second time on the seed is the stored one.
        seed = {"seed": case.options["seed"]} if step == 0 else {}
        model, optimizer = memascend.offload(
            model, original, host_memory=budget, existing="resume", **where, **options, **seed
        )
        assert optimizer.steps == step
        steps_from(Run(model, optimizer, original, batches, case.loss, records), step, step + 1)
        # Staged and dropped.
        optimizer.backward(case.loss(model, batches[0]))
        if step == 5:
            optimizer.zero_grad()
            state = {name: optimizer.state_of(p) for name, p in model.named_parameters()}
            with memascend.materialized(model):
                weights = copies(model.named_parameters())
        optimizer.close()
    expected = reference(case, torch.get_num_threads())
    got = dataclasses.replace(expected, records=records, weights=weights, state=state)
    assert differences(expected, got) == []
