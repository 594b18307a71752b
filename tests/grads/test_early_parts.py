"""Tests gradients by layer where micro-batches reach modules in different orders: bits, and bytes that wait."""

import pytest
import torch
from grads.test_by_layer import WIDTH, Block, adamw, require_same, rows, smallest, square, trained
from torch import nn

import memascend
from memascend.grads.microbatches import PartialSums

COUNT = 5


class Routed(nn.Module):
    """Each micro-batch begins at another block, so that a part of a gradient often comes before an earlier one's."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        start = int(x.detach().sum().abs() * 1e4) % len(self.blocks)
        for number in range(len(self.blocks)):
            x = self.blocks[(start + number) % len(self.blocks)](x)
        return self.head(x)


class Measured:
    """The most bytes that the sums and the parts of a run have had in memory at once."""

    def __init__(self, monkeypatch):
        self.all = self.waiting = self.uncounted = 0
        add_part = PartialSums._add_part

        def measured(sums, *arguments):
            add_part(sums, *arguments)
            parts = [part for found in sums._open.values() for part in found.early.values()]
            values = [found.values for found in sums._open.values() if found.values is not None]
            self.waiting = max(self.waiting, sum(one.nbytes for one in parts))
            there = sum(one.nbytes for one in [*parts, *values])
            self.all = max(self.all, there)
            self.uncounted = max(self.uncounted, abs(there - sums.nbytes))

        monkeypatch.setattr(PartialSums, "_add_part", measured)


MODES = pytest.mark.parametrize("gradients", ["fused", "ssd", "ram"])
BUDGETS = pytest.mark.parametrize("budget", ["smallest", None])


@MODES
@BUDGETS
def test_bits_are_those_of_one_after_the_other(tmp_path, gradients, budget):
    host_memory = None if budget is None else smallest(tmp_path, Routed, gradients)
    layers, turns = (
        trained(tmp_path, Routed, rows(COUNT), square, by_layer=by_layer, gradients=gradients, host_memory=host_memory)
        for by_layer in (True, False)
    )
    require_same(layers, turns)


@MODES
@BUDGETS
def test_parts_that_wait_for_an_earlier_micro_batch_are_within_the_limit_of_the_sums(
    tmp_path, monkeypatch, gradients, budget
):
    torch.manual_seed(0)
    model = Routed()
    host_memory = None if budget is None else smallest(tmp_path, Routed, gradients)
    model, optimizer = memascend.offload(
        model, adamw(model), storage=tmp_path / "run.store", gradients=gradients, host_memory=host_memory
    )
    found = Measured(monkeypatch)
    with optimizer:
        for _ in range(3):
            optimizer.accumulate(lambda batch: square(model, batch), rows(COUNT), by_layer=True)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer._session.accumulation.never is None
        assert 0 < found.all <= optimizer.plan.queue_bytes
        assert found.uncounted == 0
        # They do wait where memory has room for them.
        assert (found.waiting > 0) == (gradients != "ram" and budget is None)
