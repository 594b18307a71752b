"""Tests the end of processes that have threads for micro-batches: none may be in a call of torch when Python ends."""

import pytest

# Each micro-batch has a thread. `show` is called last of all that is called at exit, as it was registered first.
RUN = """
import atexit, contextlib, os, signal, sys, threading, time

def show():
    print("alive:", sum(thread.is_alive() for thread in threads))

atexit.register(show)
threads = []

import torch
from torch import nn
import memascend

torch.set_num_threads(1)

def run(storage, count):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    model, optimizer = memascend.offload(model, torch.optim.AdamW(model.parameters(), fused=True), storage=storage)

    def accumulate(loss_of=lambda batch: model(batch).square().mean()):
        optimizer.accumulate(loss_of, [torch.randn(2, 16) for _ in range(count)], by_layer=True)
        optimizer.step()
        optimizer.zero_grad()

    # The first call shows the order of units.
    accumulate()
    accumulate()
    threads.extend(thread for thread in threading.enumerate() if "micro-batch" in thread.name and thread not in threads)
    return model, optimizer, accumulate
"""

SEVERAL = (
    RUN
    + """
_, closed, _ = run(sys.argv[1] + "/closed", 8)
unclosed = run(sys.argv[1] + "/unclosed", 8)
model, _, accumulate = failed = run(sys.argv[1] + "/failed", 8)
assert len(threads) == 24
batches = iter(range(8))

def fails(batch):
    loss = model(batch).square().mean()
    if next(batches) == 2:
        raise ValueError("a bad batch")
    return loss

with contextlib.suppress(ValueError):
    accumulate(fails)
# From here on a thread runs only while this one waits.
sys.setswitchinterval(60)
closed.close()
"""
)

INTERRUPTED = (
    RUN
    + """
model, optimizer, accumulate = run(sys.argv[1] + "/store", 2)
handled, left = threading.Event(), threading.Event()

def handle(*_):
    handled.set()
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, handle)

def interrupts(gradient):
    # After the first Ctrl-C the call waits for the micro-batch, and after the second it does not.
    os.kill(os.getpid(), signal.SIGINT)
    handled.wait()
    os.kill(os.getpid(), signal.SIGINT)
    left.wait()
    time.sleep(0.5)
    return gradient

def loss_of(batch):
    out = model(batch)
    out.register_hook(interrupts)
    return out.square().mean()

class Slow:
    # What Python frees last takes longer than the backward.
    def __del__(self, sleep=time.sleep):
        sleep(1)

slow = Slow()
with contextlib.suppress(KeyboardInterrupt):
    accumulate(loss_of)
left.set()
"""
)


@pytest.mark.parametrize("program", [SEVERAL, INTERRUPTED], ids=["several runs", "left in a backward"])
def test_threads_end_before_python_does(program, python, tmp_path):
    assert "alive: 0" in python(program, tmp_path)
