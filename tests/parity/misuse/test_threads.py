"""Tests threads and interrupts: a thread uses only memory that it materialized, and interrupts do no harm."""

import contextlib
import copy
import functools
import io
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import memascend
from memascend import UsageError


def in_other_thread(function):
    """Starts `function` in a new thread.

    Returns a callable that waits for the result of `function`, up to 20 seconds, and returns this result.
    """
    return functools.partial(ThreadPoolExecutor(1).submit(function).result, 20)


def test_thread_reads_a_weight_while_another_thread_computes_with_it(offloaded):
    """Only the thread that computes with a weight uses the materialized memory.

    Other threads read a copy of the weight.
    """
    training = offloaded(steps=1)
    module = training.model.blocks[1].up
    expected = training.weights()["blocks.1.up.weight"]
    inside, looked = threading.Event(), threading.Event()

    def looks():
        assert inside.wait(20)
        try:
            return module.weight.data.clone()
        finally:
            looked.set()

    seen = []

    def compares(*_):
        seen.append(torch.equal(module.weight.data, expected))
        inside.set()
        assert looked.wait(20)
        seen.append(torch.equal(module.weight.data, expected))

    other = in_other_thread(looks)
    with module.register_forward_pre_hook(compares):
        training.loss()
    assert seen == [True, True]
    assert torch.equal(other(), expected)
    training.step(1)


def test_thread_reads_valid_weights_while_another_thread_trains(offloaded):
    training = offloaded(steps=1)
    parameters = dict(training.model.named_parameters())
    done, wrong, touches = threading.Event(), [], []

    def touch():
        while not done.is_set():
            for name, parameter in parameters.items():
                value = parameter.detach().abs().max()
                if not 0 < value < 100:
                    wrong.append((name, value))
            touches.append(None)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    ended = in_other_thread(touch)
    try:
        for index in range(3):
            training.step(index)
    finally:
        sys.setswitchinterval(interval)
        done.set()
    assert ended() is None
    assert (wrong, training.optimizer.steps) == ([], 4)
    assert touches


def test_step_is_rejected_while_another_thread_runs_a_forward(offloaded):
    training = offloaded(steps=1)
    training.loss(0).backward()
    before = training.optimizer.steps
    computing, stepped = threading.Event(), threading.Event()

    def waits(*_):
        computing.set()
        stepped.wait(20)

    with training.model.blocks[1].register_forward_pre_hook(waits):
        ended = in_other_thread(training.loss)
        try:
            assert computing.wait(20)
            with pytest.raises(UsageError, match="forward"):
                training.optimizer.step()
            with pytest.raises(UsageError):
                training.weights()
            assert training.optimizer.steps == before
        finally:
            stepped.set()
            ended()
    training.optimizer.step()
    assert training.optimizer.steps == before + 1


def test_forward_that_begins_within_a_commit_waits_for_the_commit(offloaded, monkeypatch):
    training, others = offloaded(steps=1), []
    commit = memascend.engine.Engine.commit

    def computes_in_parallel(*args, **options):
        others.append(in_other_thread(training.loss))
        time.sleep(0.3)
        return commit(*args, **options)

    monkeypatch.setattr(memascend.engine.Engine, "commit", computes_in_parallel)
    training.step(1)
    assert torch.equal(others[0](), training.loss())


def test_training_continues_after_a_thread_ends_within_a_forward(offloaded):
    """SystemExit, like an interrupt, skips the module hook that would mark the end of the module's forward."""
    training = offloaded(steps=1)

    def ends(*_):
        raise SystemExit

    def computes():
        with contextlib.suppress(SystemExit):
            training.loss()

    with training.model.blocks[1].register_forward_pre_hook(ends):
        thread = threading.Thread(target=computes)
        thread.start()
        thread.join()
    training.optimizer.zero_grad()
    training.step(1)
    assert training.optimizer.steps == 2


def test_module_that_calls_the_whole_model_gets_the_same_losses(offloaded):
    """If a module calls the whole model again, this inner call does not evict units that the outer call needs."""
    training = offloaded(steps=1)
    expected = training.loss(0).detach()
    seen = []

    def again(*_):
        if not seen:
            seen.append(None)
            with torch.no_grad():
                seen.append(training.loss(0))

    with training.model.blocks[1].up.register_forward_pre_hook(again):
        got = training.loss(0)
    assert torch.equal(got, expected)
    assert torch.equal(seen[1], expected)
    got.backward()
    training.optimizer.step()
    assert training.optimizer.steps == 2


def test_copy_or_pickle_within_materialized_is_a_plain_model(offloaded):
    training, file = offloaded(steps=1), io.BytesIO()
    with memascend.materialized(training.model):
        copied = copy.deepcopy(training.model)
        torch.save(training.model, file)
    file.seek(0)
    expected = training.weights()
    training.step(1)
    for plain in (copied, torch.load(file, weights_only=False)):
        for module in plain.modules():
            assert not [name for name in vars(module) if "memascend" in name or name.startswith("__")]
            assert not any((module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks))
        for name, parameter in plain.named_parameters():
            assert type(parameter) is torch.nn.Parameter
            assert torch.equal(parameter, expected[name])
            assert not vars(parameter)
        # offload() rejects tensors from torch.load(), because numpy may share the memory of such tensors. Offloads a
        # copy of the model instead.
        own = copy.deepcopy(plain)
        with memascend.offload(own, torch.optim.AdamW(own.parameters()))[1]:
            pass


def test_materialized_rejects_nesting_step_and_offload(offloaded):
    training = offloaded(steps=1)
    training.loss(1).backward()
    with memascend.materialized(training.model):
        with pytest.raises(UsageError, match="materialized"), memascend.materialized(training.model):
            pass
        with pytest.raises(UsageError, match="materialized"):
            training.optimizer.step()
        with pytest.raises(memascend.ConfigError):
            memascend.offload(training.model, torch.optim.AdamW(training.model.parameters()))
    training.optimizer.step()
    assert training.optimizer.steps == 2
