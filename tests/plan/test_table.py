"""Tests the comparison of state formats: bytes that a step moves, wear, storage, and what a given memory holds."""

import pytest
import torch

from memascend.plan.options import Options
from memascend.plan.table import cost_of_format, format_table
from memascend.session.decide import planned, planned_formats

WIDTH = 1024


def model(dtype=torch.bfloat16):
    with torch.device("meta"):
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]
        return torch.nn.Sequential(*layers).to(dtype)


def costs(found, made):
    elements = {name: parameter.numel() for name, parameter in made.named_parameters()}
    return {state: cost_of_format(state, one.plan, elements) for state, one in found.items()}


def test_each_format_is_planned_with_the_same_budget_and_moves_what_it_says():
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    # Room for some of what is held with 32 bits.
    plain = planned(made, optimizer, Options(device="cpu")).plan
    budget = (plain.ample + plain.all_held) // 2
    # What is held is written each step, too.
    found = costs(planned_formats(made, optimizer, Options(device="cpu", log_steps=0), budget), made)
    assert list(found) == ["fp32", "bf16", "8bit"]
    written = {state: 10**14 / cost.steps_per_100_tb / (6 * WIDTH**2) for state, cost in found.items()}
    # Values, what the master has beyond them, moments; of 8 bits also a bit for each value, and scales for each 256.
    wanted = {"fp32": 12.0, "bf16": 8.0, "8bit": 2 + 2 + 2 + 1 / 8 + 2 * 4 / 256}
    for state, each in written.items():
        assert each == pytest.approx(wanted[state], rel=0.01), state
    assert found["fp32"].held < found["bf16"].held < found["8bit"].held
    assert found["8bit"].disk_bytes < 0.6 * found["fp32"].disk_bytes
    text = format_table(list(found.values()), budget)
    assert all(f'state="{state}"' in text for state in found)
    assert "not known" in text


def test_a_format_that_does_not_go_with_the_optimizer_is_no_row():
    made = model()
    assert planned_formats(made, torch.optim.Adagrad(made.parameters()), Options(device="cpu"), 1 << 30) == {}
    sgd = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    assert list(planned_formats(made, sgd, Options(device="cpu"), 1 << 30)) == ["fp32", "bf16", "8bit"]
