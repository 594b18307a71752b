"""Tests that a step which needs more room than a plan can know gets it, where nobody gave a budget."""

import re
from functools import partial

import pytest
import torch
from parity.zoo_plain import KeepsTransposed
from support import checkpointed
from support.bits import same_states
from support.chains import offloaded
from support.fake_device import fake
from support.grids import covered
from torch import nn
from torch.utils.checkpoint import checkpoint

import memascend
from memascend.plan.options import parse_bytes

__all__ = ["fake"]

WIDTH, BLOCKS, STEPS = 64, 12, 3
pytestmark = pytest.mark.usefixtures("one_thread")


class Block(checkpointed.Block):
    def __init__(self):
        super().__init__(WIDTH)


class Stack(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Segments(Stack):
    """One checkpoint for four blocks: its recomputation holds them together."""

    def run(self, start, x):
        for block in self.blocks[start : start + 4]:
            x = block(x)
        return x

    def forward(self, x):
        for start in range(0, BLOCKS, 4):
            x = checkpoint(self.run, start, x, use_reentrant=False)
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.cell(x)[0]


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x):
        return x + KeepsTransposed.apply(x, self.weight)


def plain(model, x):
    return model(x).square().mean()


def penalised(model, x):
    x.requires_grad_(True)
    out = model(x).square().mean()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().sum()


CASES = {
    "LSTM": (lambda: Stack(Recurrent), plain),
    "checkpoint segments": (Segments, plain),
    "view kept by a function": (lambda: Stack(Kept), plain),
    "gradient penalty": (Stack, penalised),
}


def train(model, optimizer, loss):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        loss(model, torch.randn(6, WIDTH, generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


FUSED = partial(torch.optim.AdamW, fused=True)


def made(make, storage, **options):
    torch.manual_seed(0)
    return offloaded(storage, make(), FUSED, **{"gradients": "ssd", **options})


def in_memory(make, loss):
    torch.manual_seed(0)
    model = make()
    train(model, FUSED(model.parameters(), lr=0.01), loss)
    return model.state_dict()


@pytest.mark.parametrize(
    ("place", "case"),
    [
        *(("host", case) for case in ("LSTM", "checkpoint segments", "view kept by a function")),
        ("device", "checkpoint segments"),
        pytest.param("host", "gradient penalty", marks=pytest.mark.slow),
        pytest.param("device", "view kept by a function", marks=pytest.mark.slow),
        pytest.param("device", "gradient penalty", marks=pytest.mark.slow),
    ],
)
def test_room_is_made_where_nobody_gave_a_budget(tmp_path, caplog, request, place, case):
    """It is logged, and a part of the plan."""
    on_device = {}
    if place == "device":
        request.getfixturevalue("fake")
        on_device = {"device": "cuda", "host_memory": "1GiB"}
    make, loss = CASES[case]
    wanted = in_memory(make, loss)
    model, optimizer = made(make, tmp_path, **on_device)
    with optimizer:
        before = optimizer.plan
        with caplog.at_level("WARNING", logger="memascend"):
            train(model, optimizer, loss)
        assert same_states(model.state_dict(), wanted)
        after, report = optimizer.plan, optimizer.report().to_dict()
        places = sum(after.classes.values()) - sum(before.classes.values())
        assert places == sum("were added for unit" in message for message in caplog.messages)
        assert places > 0 or (place == "host" and case != "checkpoint segments")
        assert sum(after.host.values()) == after.host_peak
        if on_device:
            added = after.device["units"] - before.device["units"]
            assert added == after.device_budget - before.device_budget == after.device_peak - before.device_peak > 0
            assert report["device"]["owners"]["units"]["bytes"] == after.device["units"]
            assert report["device"]["peak"] <= report["device"]["budget"] == after.device_budget
            assert (after.host, after.budget) == (before.host, before.budget)
        else:
            added = after.host["units"] - before.host["units"]
            assert added == after.budget - before.budget
            assert (added > 0) == (places > 0)
            assert report["host"]["total"] <= report["host"]["budget"] == after.budget
            assert report["host"]["owners"]["units"]["bytes"] <= after.host["units"]


def test_a_device_that_is_full_says_so(tmp_path, fake):
    """What has no room there is an error, and the step can be done anew where room was made."""
    model, optimizer = made(Segments, tmp_path, device="cuda")
    with optimizer:
        has, fake.memory = fake.memory, full
        with pytest.raises(memascend.MemoryLimitError, match="device_memory="):
            train(model, optimizer, plain)
        assert optimizer.steps == 0
        fake.memory = has
        optimizer.zero_grad()
        train(model, optimizer, plain)
        assert optimizer.steps == STEPS


def full(nbytes):
    raise torch.OutOfMemoryError(f"{nbytes} bytes are not there")


@pytest.mark.usefixtures("fake")
def test_a_budget_given_for_a_device_is_kept(tmp_path):
    _, optimizer = made(Segments, tmp_path / "one", device="cuda")
    budget = optimizer.plan.device_smallest
    optimizer.close()
    model, optimizer = made(Segments, tmp_path / "two", device="cuda", device_memory=budget)
    with optimizer, pytest.raises(memascend.BudgetError, match="no memory for unit"):
        train(model, optimizer, plain)


@pytest.mark.parametrize(("case", "gradients"), covered(CASES, ["ssd", "fused"]))
def test_a_given_budget_is_kept_and_the_one_that_the_error_names_works(tmp_path, case, gradients):
    make, loss = CASES[case]
    wanted = in_memory(make, loss)
    _, optimizer = made(make, tmp_path / "one", gradients=gradients)
    budget = optimizer.plan.smallest
    optimizer.close()
    model, optimizer = made(make, tmp_path / "two", gradients=gradients, host_memory=budget)
    with optimizer:
        if case == "LSTM":
            train(model, optimizer, loss)
            return
        with pytest.raises(memascend.BudgetError, match="no memory for unit") as error:
            train(model, optimizer, loss)
        assert optimizer.steps == 0
        assert optimizer.plan.budget == budget
    named = re.search(r'host_memory="(\S+)" has a place for every unit', str(error.value))[1]
    assert error.value.smallest <= parse_bytes(named) < 1.01 * error.value.smallest
    # The number, or what the message says instead.
    larger = error.value.smallest if gradients == "ssd" else named
    model, optimizer = made(make, tmp_path / "three", gradients=gradients, host_memory=larger)
    with optimizer:
        train(model, optimizer, loss)
        assert same_states(model.state_dict(), wanted)
