"""Tests what a plan says of a state format: bytes that a step writes, storage, and what a given memory keeps in RAM."""

import pytest
import torch

from memascend.plan.options import Options
from memascend.session.decide import planned

WIDTH = 1024


def test_each_format_moves_what_it_says_within_the_same_budget():
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))).bfloat16()
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
        assert sum(plan.written_bytes.values()) / (6 * WIDTH**2) == pytest.approx(wanted[state], rel=0.01), state
    assert plans["fp32"].ram_tier_part < plans["bf16"].ram_tier_part < plans["8bit"].ram_tier_part
    assert plans["8bit"].disk_bytes < 0.6 * plans["fp32"].disk_bytes
