"""Tests values that are loaded into the model: committed, or as they were before."""

from functools import partial

import pytest
import torch
from support.bits import same_states
from support.chains import chain, offloaded, step, values
from torch import nn

WIDTH = 16
FUSED = partial(torch.optim.AdamW, fused=True)


def stack():
    """Equal layers, and statistics that are a buffer."""
    return nn.Sequential(*chain(bias=True, width=WIDTH), nn.BatchNorm1d(WIDTH))


def begun(folder, **options):
    return offloaded(folder / "run.store", stack(), FUSED, host_memory="64MiB", **options)


@pytest.mark.parametrize("wrong", ["shape", "missing", "unexpected"])
def test_a_load_that_torch_refuses_changes_nothing(tmp_path, wrong):
    model, optimizer = begun(tmp_path)
    step(model, optimizer)
    before = values(model)
    loaded = {name: tensor + 1 for name, tensor in before.items()}
    if wrong == "shape":
        loaded["1.weight"] = torch.zeros(3, 3)
    elif wrong == "missing":
        del loaded["1.weight"]
    else:
        loaded["more"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="Error"):
        model.load_state_dict(loaded)
    assert same_states(values(model), before)
    # A load that fits takes nothing of the other with it.
    before["1.bias"] = before["1.bias"] + 2
    model.load_state_dict({"1.bias": before["1.bias"]}, strict=False)
    optimizer.close()
    model, optimizer = begun(tmp_path, existing="resume")
    with optimizer:
        assert same_states(values(model), before)


def test_a_buffer_with_gaps_is_loaded_and_committed(tmp_path):
    """A part of a larger tensor: what lies between its elements is not its own."""

    def made(**options):
        model = stack()
        model.register_buffer("table", torch.zeros(2, 4)[:, :2])
        return offloaded(tmp_path / "run.store", model, FUSED, **options)

    model, optimizer = made()
    with optimizer:
        table = torch.tensor([[0.0, 0.0], [0.0, 5.0]])
        model.load_state_dict({"table": table}, strict=False)
    model, optimizer = made(existing="resume")
    with optimizer:
        assert torch.equal(model.table, table)


class Shift(nn.Module):
    """What no graph saves a weight of."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x + self.one + self.other).sum()


def test_a_backward_of_an_older_graph_meets_what_was_loaded(tmp_path):
    plain, model = Shift(), Shift()
    theirs = FUSED(plain.parameters(), lr=1e-2)
    model, optimizer = offloaded(tmp_path / "s", model, FUSED, gradients="fused")
    with optimizer:
        for of, opt in ((plain, theirs), (model, optimizer)):
            loss = of(torch.zeros(4))
            of.load_state_dict({"one": torch.full((4,), 2.0), "other": torch.full((4,), 3.0)})
            loss.backward()
            opt.step()
        assert same_states(values(model), values(plain))
