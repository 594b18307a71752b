"""Tests ends that nobody planned: a dropped model, an exit without close."""

import gc
import os
import weakref

import pytest
import torch
from parity.harness import adamw
from parity.zoo_plain import Stack, next_token

import memascend


def test_nothing_outlives_a_model_that_is_dropped(tmp_path):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def once(storage):
        model = Stack()
        model, optimizer = memascend.offload(model, adamw(model), storage=storage, host_memory="64MiB")
        next_token(model, torch.zeros(2, 5, dtype=torch.long)).backward()
        optimizer.step()
        return weakref.ref(model), weakref.ref(optimizer)

    before = None
    for index in range(6):
        references = once(tmp_path / f"{index}.store")
        gc.collect()
        assert [reference() for reference in references] == [None, None]
        if index == 2:
            before = resident(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    after = resident(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    assert after[0] - before[0] < 8 << 20
    assert after[1:] == before[1:]
    model = Stack()
    with memascend.offload(model, adamw(model), storage=tmp_path / "0.store", existing="resume")[1] as optimizer:
        assert optimizer.steps == 1


EXITS = {
    "the end": "",
    "an exception": "raise KeyError('the end')",
    "in the middle of a step": "loss(model).backward()",
    "in a thread": "import threading; threading.Thread(target=lambda: loss(model).backward()).start()",
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("end", EXITS)
def test_an_exit_without_close_keeps_what_was_committed(tmp_path, loaded, end):
    program = f"""if True:
        import sys, torch, memascend
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        options = dict(storage=sys.argv[1], durability="none", existing="resume")
        model, optimizer = memascend.offload(model, optimizer, **options)
        print("steps", optimizer.steps)
        def loss(model):
            return model(torch.ones(3, 64)).square().mean()
        for _ in range(2):
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        {EXITS[end]}
    """
    status = 1 if end == "an exception" else 0
    assert "steps 0" in loaded(program, tmp_path / "run.store", status=status)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    again = torch.optim.AdamW(model.parameters())
    with memascend.offload(model, again, storage=tmp_path / "run.store", existing="resume")[1] as optimizer:
        assert optimizer.steps == 2
