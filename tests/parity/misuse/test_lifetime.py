"""Tests that nothing of a model is left that was dropped."""

import gc
import os
import weakref

import torch
from memory.measured import status
from parity.harness import adamw
from parity.zoo_plain import Stack, next_token

import memascend


def test_nothing_outlives_a_model_that_is_dropped(tmp_path):
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
            before = status()["VmRSS"], len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    after = status()["VmRSS"], len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    assert after[0] - before[0] < 8 << 20
    assert after[1:] == before[1:]
    model = Stack()
    with memascend.offload(model, adamw(model), storage=tmp_path / "0.store", existing="resume")[1] as optimizer:
        assert optimizer.steps == 1
