"""Tests the end of processes that have threads for micro-batches: none may be in a call of torch when Python ends."""

# `show` is called last of all that is called at exit, as it was registered first.
PROGRAM = """
import atexit, contextlib, os, signal, sys, threading, time

def show():
    print("alive:", any(thread.is_alive() for thread in threads))

atexit.register(show)
threads = []

import torch
from torch import nn
import memascend

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
model, optimizer = memascend.offload(
    model, torch.optim.AdamW(model.parameters(), fused=True), storage=sys.argv[1] + "/store"
)

def accumulate(loss_of=lambda batch: model(batch).square().mean()):
    optimizer.accumulate(loss_of, [torch.randn(2, 16) for _ in range(2)], by_layer=True)
    optimizer.step()
    optimizer.zero_grad()

# The first call shows the order of units.
accumulate()
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
    threads.append(threading.current_thread())
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
print("left:", any(thread.is_alive() for thread in threads))
left.set()
"""


def test_threads_end_before_python_does(python, tmp_path):
    """Those of a call that was left by a second Ctrl-C, in a backward."""
    said = python(PROGRAM, tmp_path)
    assert "left: True" in said
    assert "alive: False" in said
