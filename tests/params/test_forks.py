"""Tests what a forked child does with the memory of weights: its writes never reach its parent."""

import copy
import ctypes
import multiprocessing
import os

import pytest
import torch
from support.bits import same_bits
from support.chains import batch, step
from support.forked_child import in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

# How a program comes to have memory of a weight.
WAYS = {
    "state dict": lambda model: model.state_dict()["1.weight"],
    "numpy": lambda model: torch.from_numpy(model[1].weight.detach().numpy()),
    "deep copy": lambda model: copy.deepcopy(model)[1].weight.detach(),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_child_writes_is_its_own(training, way):
    model, offloaded = training(units=2)
    expected = [p.detach().clone() for p in model.parameters()]
    computed = model(batch()).detach()
    reached = WAYS[way](model)
    before = reached.clone()

    def write():
        read = same_bits(reached, before)
        reached.fill_(7)
        # What a child of the child writes is not the child's.
        in_child(lambda: reached.fill_(9))
        return read and bool((reached == 7).all())

    for fork in (os.fork, ctypes.CDLL(None).fork):
        assert in_child(write, fork) == "True"
        assert same_bits(reached, before)
    assert same_bits(model(batch()).detach(), computed)
    assert all(same_bits(one, other) for one, other in zip(model.parameters(), expected, strict=True))
    reached = None
    step(model, offloaded)


def test_a_child_keeps_what_its_parent_lets_go(training):
    model, offloaded = training(units=2)
    state = model.state_dict()
    before = {name: values.clone() for name, values in state.items()}
    context = multiprocessing.get_context("fork")
    gone, said = context.Event(), context.SimpleQueue()

    def read():
        gone.wait()
        said.put(all(same_bits(values, before[name]) for name, values in state.items()))

    child = context.Process(target=read)
    child.start()
    state.clear()
    step(model, offloaded)
    gone.set()
    assert said.get()
    child.join()
    assert child.exitcode == 0
