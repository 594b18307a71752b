"""Tests gradients by layer where micro-batches reach modules in different orders: bits, and bytes that wait."""

import pytest
from grads.test_by_layer import WIDTH, Block, require_same, rows, smallest, square, trained
from torch import nn

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
        self.all = self.waiting = self.uncounted = self.limit = 0
        add_part = PartialSums._add_part

        def measured(sums, *arguments):
            add_part(sums, *arguments)
            parts = [part for found in sums._open.values() for part in found.early.values()]
            values = [found.values for found in sums._open.values() if found.values is not None]
            self.waiting = max(self.waiting, sum(one.nbytes for one in parts))
            there = sum(one.nbytes for one in [*parts, *values])
            self.all, self.limit = max(self.all, there), sums.limit
            self.uncounted = max(self.uncounted, abs(there - sums.nbytes))

        monkeypatch.setattr(PartialSums, "_add_part", measured)


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram"])
@pytest.mark.parametrize("budget", ["smallest", None])
def test_bits_are_those_of_one_after_the_other_and_parts_that_wait_are_within_the_limit(
    tmp_path, monkeypatch, gradients, budget
):
    host_memory = None if budget is None else smallest(tmp_path, Routed, gradients)
    found = Measured(monkeypatch)
    layers, turns = (
        trained(tmp_path, Routed, rows(COUNT), square, by_layer=by_layer, gradients=gradients, host_memory=host_memory)
        for by_layer in (True, False)
    )
    require_same(layers, turns)
    assert 0 < found.all <= found.limit
    assert found.uncounted == 0
    # They do wait where memory has room for them.
    assert (found.waiting > 0) == (gradients != "ram" and budget is None)
