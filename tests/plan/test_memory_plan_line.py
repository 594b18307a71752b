"""Tests what steps move: at six budgets, a line down to the one that holds all; in each format of the state."""

import pytest
import torch
from plan.test_units import Language
from torch import nn

from memascend.plan.options import Options
from memascend.session.decide import planned

WIDTH = 768
# What a parameter moves with nothing in RAM, and takes where it is in RAM: values, state and a gradient that waits.
MOVED = {torch.float32: 28, torch.bfloat16: 26}
RAM_TIER = {torch.float32: 16, torch.bfloat16: 14}


# What is still moved of a parameter that is in RAM, where each step is durable: its gradient, raw, and a part of its
# values and its state, which are written whole each 16th step.
LOGGED = {torch.float32: 4 + 12 / 16, torch.bfloat16: 2 + 12 / 16}


@pytest.mark.parametrize(
    ("kind", "durability"), [(torch.optim.AdamW, "step"), (torch.optim.AdamW, "none"), (torch.optim.SGD, "none")]
)
@pytest.mark.parametrize("dtype", MOVED)
def test_bytes_of_a_step_at_six_budgets(dtype, kind, durability):
    with torch.device("meta"):
        # 127 M parameters, of which the most are blocks, as in large models.
        model = Language(25, WIDTH, 4096).to(dtype)
    elements = sum(parameter.numel() for parameter in model.parameters())
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    log = {"storage": "store", "log_steps": 16} if durability == "step" else {}

    def plan_of(budget):
        options = Options(host_memory=budget, gradients="fused", durability=durability, device="cpu", **log)
        return planned(model, kind(model.parameters(), lr=0.1, **momentum), options).plan

    default = plan_of(None)
    moved, takes = MOVED[dtype] * elements, RAM_TIER[dtype] * elements
    still = LOGGED[dtype] * elements if log else 0
    if kind is torch.optim.SGD:
        # One moment instead of two, of four bytes each; a master of its own instead of the rest.
        moved, takes = default.moved_bytes, default.all_in_ram - default.comfortable
    assert default.all_in_ram - default.comfortable == pytest.approx(takes, rel=0.01)
    for part in range(6):
        plan = plan_of(default.comfortable + (default.all_in_ram - default.comfortable) * part // 5)
        line = moved - (moved - still) * (plan.budget - default.comfortable) / takes
        assert plan.moved_bytes == pytest.approx(line, abs=0.03 * moved), part
        assert plan.ram_tier_part == pytest.approx(part / 5, abs=0.05)
    assert log or plan.moved_bytes == 0


def test_each_format_moves_what_it_says_within_the_same_budget():
    width = 1024
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6))).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    # Room for some of what is kept in RAM with 32 bits.
    plain = planned(model, optimizer, Options(device="cpu")).plan
    budget = (plain.ample + plain.all_in_ram) // 2
    # Values, what the master has beyond them, moments; of 8 bits also a bit for each value, and scales for each 256.
    wanted = {"fp32": 12.0, "bf16": 8.0, "8bit": 2 + 2 + 2 + 1 / 8 + 2 * 4 / 256}
    plans = {
        # Without a log, what is kept in RAM is written each step, too.
        state: planned(model, optimizer, Options(device="cpu", log_steps=0, state=state, host_memory=budget)).plan
        for state in wanted
    }
    for state, plan in plans.items():
        assert sum(plan.written_bytes.values()) / (6 * width**2) == pytest.approx(wanted[state], rel=0.01), state
    assert plans["fp32"].ram_tier_part < plans["bf16"].ram_tier_part < plans["8bit"].ram_tier_part
    assert plans["8bit"].disk_bytes < 0.6 * plans["fp32"].disk_bytes
