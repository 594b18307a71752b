"""Tests that memascend does not change the exit status and error of a process, and that no memory outlives a model."""

import gc
import os
import weakref

import pytest
import torch
from memory.measured import status
from parity.harness import adamw
from parity.zoo_plain import Stack, next_token
from support.checkpointed import Model
from torch import nn

import memascend
from memascend.engine import Store

# All programs contain this code. Most programs then leave a backward unfinished, so that the graph still holds saved
# tensors of memascend when the process ends.
BEGIN = """
import sys, threading, torch, memascend
from torch import nn
from torch.utils.checkpoint import checkpoint
storage, how = sys.argv[1:]
torch.set_num_threads(1)

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=how == "reentrant") if how else block(x)
        return x

model = Blocks()
optimizer = torch.optim.AdamW(model.parameters())
options = {"durability": "none", **({"activations": "ssd"} if how == "kept" else {})}
model, optimizer = memascend.offload(model, optimizer, storage=storage, gradients="fused", **options)
x = torch.randn(256, 64, requires_grad=how == "reentrant")

def loss():
    return model(x).square().sum()

loss().backward()
optimizer.step()
optimizer.zero_grad()
"""
# The second backward raises, because "fused" accepts only one gradient per parameter and step.
TWICE = "loss().backward()\nloss().backward()\n"
CAUGHT = "loss().backward()\ntry:\n    loss().backward()\nexcept memascend.UsageError:\n    pass\n"
EXIT = """
def stop(_):
    raise SystemExit(3)
model.blocks[2].bias.register_hook(stop)
loss().backward()
"""
CLOSED_ELSEWHERE = """
def work():
    first, second = loss(), loss()
    first.backward()
    try:
        second.backward()
    except memascend.UsageError:
        pass
for target in (work, optimizer.close):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
"""
# For each case: how the blocks are computed, the code of the program, and the result of the program. The result is the
# exit status, or the name of the error that the program raises.
ENDS = {
    "the end": ("", "", 0),
    "in the middle of a step": ("", "loss().backward()", 0),
    "in a thread": ("", "threading.Thread(target=lambda: loss().backward()).start()", 0),
    "uncaught": ("", TWICE, "UsageError"),
    "recomputed": ("recomputed", CAUGHT, 0),
    "reentrant": ("reentrant", CAUGHT, 0),
    "kept": ("kept", CAUGHT, 0),
    "exit": ("", EXIT, 3),
    "closed elsewhere": ("", CLOSED_ELSEWHERE, 0),
    # The variable `error` keeps the failed backward alive.
    "held": ("", CAUGHT.replace("    pass", "    error = sys.exc_info()"), 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_process_exit_keeps_the_status_the_error_and_the_last_commit(tmp_path, loaded, end):
    how, program, raised = ENDS[end]
    status = raised if isinstance(raised, int) else 1
    output = loaded(BEGIN + program, tmp_path / "run.store", how, status=status, whole=True)
    assert output.count("Traceback") == (status == 1), output
    assert raised in output.splitlines()[-1] if status == 1 else output == ""
    with Store.open(tmp_path / "run.store") as store:
        assert store.step == 1


# Exit functions run in reverse order: `show`, which is registered first, runs last.
SHOW = """
import atexit
def show():
    print("alive:", any(thread.is_alive() for thread in threads))
atexit.register(show)
threads = []
"""
LEFT = """
import contextlib, os, signal, time
handled, left = threading.Event(), threading.Event()

def accumulate(loss_of=lambda x: model(x).square().sum()):
    optimizer.accumulate(loss_of, [x, x], by_layer=True)
    optimizer.step()
    optimizer.zero_grad()

def handle(*_):
    handled.set()
    raise KeyboardInterrupt

def interrupts(gradient):
    # After the first Ctrl-C, accumulate() waits for the micro-batch. After the second Ctrl-C, it stops waiting.
    os.kill(os.getpid(), signal.SIGINT)
    handled.wait()
    os.kill(os.getpid(), signal.SIGINT)
    left.wait()
    time.sleep(0.5)
    return gradient

def loss_of(x):
    threads.append(threading.current_thread())
    out = model(x)
    out.register_hook(interrupts)
    return out.square().sum()

class Slow:
    # Python frees `slow` last. Freeing `slow` takes longer than the backward.
    def __del__(self, sleep=time.sleep):
        sleep(1)

slow = Slow()
# The first call records the order of units.
accumulate()
signal.signal(signal.SIGINT, handle)
with contextlib.suppress(KeyboardInterrupt):
    accumulate(loss_of)
print("left:", any(thread.is_alive() for thread in threads))
left.set()
"""


def test_threads_of_micro_batches_end_before_python_does(loaded, tmp_path):
    """If a second Ctrl-C ends accumulate() during a backward, the threads of accumulate() end before Python ends."""
    output = loaded(SHOW + BEGIN + LEFT, tmp_path / "run.store", "", whole=True)
    assert "left: True" in output
    assert "alive: False" in output


def test_interrupted_recomputation_restores_the_saved_tensor_hooks(tmp_path):
    """After an interrupted recomputation and zero_grad(), the user's saved-tensor hooks are active again."""
    torch.manual_seed(0)
    model = Model(16, 3, reentrant=True)
    model, optimizer = memascend.offload(model, adamw(model), storage=tmp_path / "run.store", gradients="ssd")
    x = torch.randn(4, 16, requires_grad=True)

    def stop(*_):
        if torch._C._current_graph_task_id() != -1:
            raise KeyboardInterrupt

    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    with optimizer:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with model.blocks[1].register_forward_pre_hook(stop), pytest.raises(KeyboardInterrupt):
                model(x).sum().backward()
            optimizer.zero_grad()
            count = len(seen)
            other = torch.ones(3, requires_grad=True)
            (other * other).sum()
            assert len(seen) > count
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        with model.blocks[1].register_forward_pre_hook(stop), pytest.raises(KeyboardInterrupt):
            model(x).sum().backward()
        optimizer.zero_grad()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        model(x).sum().backward()
        optimizer.step()
        assert optimizer.steps == 1


def test_zero_grad_frees_the_activations_of_a_failed_backward(tmp_path):
    """zero_grad() frees the activations of a failed backward.

    Without zero_grad(), torch would keep the activations until the next backward.
    """
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    model, optimizer = memascend.offload(model, adamw(model), storage=tmp_path / "run.store", gradients="fused")
    kept = weakref.WeakSet()

    class Watched:
        def __init__(self, tensor):
            self.tensor = tensor
            kept.add(self)

    def fail(_):
        raise ValueError

    with optimizer:
        x = torch.randn(4, 16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(Watched, lambda watched: watched.tensor):
            y = x.sin().cos()
        z = model(y)
        model[2].weight.register_hook(fail)
        with pytest.raises(ValueError):  # noqa: PT011 - the hook raises it
            z.sum().backward()
        assert kept
        del y, z
        optimizer.zero_grad()
        assert not kept


def test_dropped_model_frees_its_memory_files_and_threads(tmp_path):
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
