"""Tests steps that need more memory for units than planned: they get the memory, or raise an error."""

import re
from functools import partial

import pytest
import torch
from support import chains, checkpointed
from support.bits import same_states
from support.chains import batch, offloaded, values
from torch import nn
from torch.utils.checkpoint import checkpoint

import memascend
from memascend.device.device import Device
from memascend.plan.options import parse_bytes

WIDTH, BLOCKS, STEPS = 64, 12, 3
FUSED = partial(torch.optim.AdamW, fused=True)
pytestmark = pytest.mark.usefixtures("one_thread")


class Segments(nn.Module):
    """A model that checkpoints segments of four blocks.

    Recomputing a segment needs the units of four blocks at once.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(checkpointed.Block(WIDTH) for _ in range(BLOCKS))

    def run(self, start, x):
        for block in self.blocks[start : start + 4]:
            x = block(x)
        return x

    def forward(self, x):
        for start in range(0, BLOCKS, 4):
            x = checkpoint(self.run, start, x, use_reentrant=False)
        return x


def loss_of(model, seed):
    return model(batch(seed, WIDTH).to(next(model.parameters()).device)).square().mean()


train = partial(chains.train, seeds=range(STEPS), of=loss_of)


def made(storage, **options):
    # A simulated device computes arbitrary values, which may not be finite.
    return offloaded(storage, Segments(), FUSED, nonfinite="commit", **{"gradients": "ssd", **options})


@pytest.fixture(scope="module")
def wanted():
    """Returns the state dict of a model that was trained in memory."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = Segments()
    train(model, FUSED(model.parameters(), lr=1e-2))
    torch.set_num_threads(before)
    return model.state_dict()


def test_step_without_a_given_budget_gets_the_missing_memory(tmp_path, caplog, wanted):
    """Without a budget from the user, a step gets the missing memory.

    The library logs the added memory and adds it to the plan.
    """
    model, optimizer = made(tmp_path)
    with optimizer, caplog.at_level("WARNING", logger="memascend"):
        before = optimizer.plan
        train(model, optimizer)
        assert same_states(values(model), wanted)
        after, host = optimizer.plan, optimizer.report().to_dict()["host"]
        places = sum(after.classes.values()) - sum(before.classes.values())
        assert places == sum("more than the planned" in message for message in caplog.messages) > 0
        assert after.host["units"] - before.host["units"] == after.budget - before.budget > 0
        assert sum(after.host.values()) == after.host_peak
        assert host["total"] <= host["budget"] == after.budget
        assert host["owners"]["units"]["bytes"] <= after.host["units"]


@pytest.mark.gpu
def test_step_without_a_given_device_budget_gets_device_memory(tmp_path, caplog):
    model, optimizer = made(tmp_path, device="cuda", host_memory="1GiB")
    with optimizer, caplog.at_level("WARNING", logger="memascend"):
        before = optimizer.plan
        train(model, optimizer)
        after, device = optimizer.plan, optimizer.report().to_dict()["device"]
        places = sum(after.classes.values()) - sum(before.classes.values())
        assert places == sum("more than the planned" in message for message in caplog.messages) > 0
        added = after.device["units"] - before.device["units"]
        assert added == after.device_budget - before.device_budget == after.device_peak - before.device_peak > 0
        assert device["owners"]["units"]["bytes"] == after.device["units"]
        assert device["peak"] <= device["budget"] == after.device_budget
        assert (after.host, after.budget) == (before.host, before.budget)


@pytest.mark.gpu
def test_full_device_raises_memory_limit_error_and_step_can_be_repeated(tmp_path, monkeypatch):
    """If the device has no memory for a unit, the step raises an error.

    Once memory is free, the step can be repeated.
    """

    def full(_device, nbytes):
        raise torch.OutOfMemoryError(f"the device cannot allocate {nbytes} bytes")

    model, optimizer = made(tmp_path, device="cuda")
    with optimizer:
        with monkeypatch.context() as patch:
            patch.setattr(Device, "memory", full)
            with pytest.raises(memascend.MemoryLimitError, match="device_memory="):
                train(model, optimizer)
        assert optimizer.steps == 0
        optimizer.zero_grad()
        train(model, optimizer)
        assert optimizer.steps == STEPS


@pytest.mark.gpu
def test_step_over_a_given_device_budget_raises_budget_error(tmp_path):
    with made(tmp_path / "one", device="cuda")[1] as optimizer:
        budget = optimizer.plan.device_smallest
    model, optimizer = made(tmp_path / "two", device="cuda", device_memory=budget)
    with optimizer, pytest.raises(memascend.BudgetError, match="no memory for unit"):
        train(model, optimizer)


@pytest.mark.parametrize("gradients", ["ssd", "fused"])
def test_budget_error_of_a_step_names_a_sufficient_host_memory(tmp_path, gradients, wanted):
    with made(tmp_path / "one", gradients=gradients)[1] as optimizer:
        budget = optimizer.plan.smallest
    model, optimizer = made(tmp_path / "two", gradients=gradients, host_memory=budget)
    with optimizer:
        with pytest.raises(memascend.BudgetError, match="no memory for unit") as error:
            train(model, optimizer)
        assert (optimizer.steps, optimizer.plan.budget) == (0, budget)
    named = re.search(r'host_memory="(\S+)", which has memory for more units', str(error.value))[1]
    assert error.value.smallest <= parse_bytes(named) < 1.01 * error.value.smallest
    # With "ssd", trains with the budget in `error.value.smallest`. With "fused", trains with the budget that the
    # message names.
    larger = error.value.smallest if gradients == "ssd" else named
    model, optimizer = made(tmp_path / "three", gradients=gradients, host_memory=larger)
    with optimizer:
        train(model, optimizer)
        assert same_states(values(model), wanted)
