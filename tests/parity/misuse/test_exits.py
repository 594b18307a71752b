"""Tests how a process ends after an interrupted training: its own status, and only its own error on stderr."""

import subprocess
import sys
import weakref

import pytest
import torch
from parity.harness import adamw
from support.checkpointed import Model
from torch import nn

import memascend

# A part of a backward is left over in each of them, and the saved tensors that it holds are ours.
BEGIN = """
import sys, threading, torch, memascend
from torch import nn
from torch.utils.checkpoint import checkpoint
storage, how = sys.argv[1:]
torch.set_num_threads(1)
options = {}
if how.startswith("kept"):
    options = {"activations": "ssd"}

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=how == "reentrant") if how in CHECKPOINTED else block(x)
        return x

CHECKPOINTED = ("recomputed", "reentrant", "kept")
model = Blocks()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = memascend.offload(model, optimizer, storage=storage, gradients="fused", **options)
x = torch.randn(256, 64, requires_grad=how == "reentrant")

def loss():
    return model(x).square().sum()

for _ in range(2):
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()

def fail(error):
    def hook(*_):
        raise error
    return hook
"""
# Two gradients for one parameter.
TWICE = "loss().backward()\nloss().backward()\n"
CAUGHT = "loss().backward()\ntry:\n    loss().backward()\nexcept memascend.UsageError:\n    pass\n"
HOOKED = "last = model.blocks[2].bias\nlast.register_hook(fail({error}))\n"
INTERRUPTED = "try:\n    loss().backward()\nexcept KeyboardInterrupt:\n    pass\n"
THREAD = """
def work():
    try:
        loss().backward()
        loss().backward()
    except memascend.UsageError:
        pass
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
FORWARD = """
def stop(*_):
    raise KeyboardInterrupt
model.blocks[2].register_forward_pre_hook(stop)
try:
    loss()
except KeyboardInterrupt:
    pass
"""
BOTH = "first.backward()\ntry:\n    second.backward()\nexcept memascend.UsageError:\n    pass\n"
OURS_IN_THEIRS = f"""
with torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor], lambda kept: kept[0]):
    first, second = loss(), loss()
{BOTH}"""
CLOSED_ELSEWHERE = f"""
first, second = loss(), loss()
{BOTH}
thread = threading.Thread(target=optimizer.close)
thread.start()
thread.join()
"""
# What is raised, and the status of the process.
ENDS = {
    "uncaught": ("", TWICE, "UsageError"),
    "caught": ("", CAUGHT, None),
    "closed": ("", CAUGHT + "optimizer.close()\n", None),
    "zeroed": ("", CAUGHT + "optimizer.zero_grad()\nloss().backward()\noptimizer.step()\n", None),
    "interrupted": ("", HOOKED.format(error="KeyboardInterrupt") + INTERRUPTED, None),
    "exit": ("", HOOKED.format(error="SystemExit(3)") + "loss().backward()\n", 3),
    "recomputed": ("recomputed", CAUGHT, None),
    "reentrant": ("reentrant", CAUGHT, None),
    "kept": ("kept", CAUGHT, None),
    "thread": ("", THREAD, None),
    "forward": ("", FORWARD, None),
    "theirs": ("", OURS_IN_THEIRS, None),
    "closed elsewhere": ("", CLOSED_ELSEWHERE, None),
    # The one that failed is still held by what it raised.
    "held": ("", CAUGHT.replace("    pass", "    error = sys.exc_info()"), None),
}


# The others are the same fault by other ways, and each is a process of its own.
USUAL = ("uncaught", "recomputed")


@pytest.mark.parametrize("end", [pytest.param(end, marks=() if end in USUAL else pytest.mark.slow) for end in ENDS])
def test_a_process_ends_as_it_would_without_us(tmp_path, end):
    how, program, raised = ENDS[end]
    words = [sys.executable, "-c", BEGIN + program, str(tmp_path / "run.store"), how]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    if raised is None or isinstance(raised, int):
        assert (done.returncode, done.stderr) == (raised or 0, "")
    else:
        assert done.returncode == 1, done
        assert done.stderr.count("Traceback") == 1, done.stderr
        assert raised in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_interrupt_within_a_recomputation_takes_nobodys_hooks(tmp_path, error):
    """What was pushed within a backward has gone with it: what is on top afterwards is the user's."""
    torch.manual_seed(0)
    model = Model(16, 3, reentrant=True)
    model, optimizer = memascend.offload(model, adamw(model), storage=tmp_path / "run.store", gradients="ssd")
    x = torch.randn(4, 16, requires_grad=True)

    def stop(*_):
        if torch._C._current_graph_task_id() != -1:
            raise error

    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    with optimizer:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with model.blocks[1].register_forward_pre_hook(stop), pytest.raises(error):
                model(x).sum().backward()
            optimizer.zero_grad()
            count = len(seen)
            other = torch.ones(3, requires_grad=True)
            (other * other).sum()
            assert len(seen) > count
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        with model.blocks[1].register_forward_pre_hook(stop), pytest.raises(error):
            model(x).sum().backward()
        optimizer.zero_grad()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        model(x).sum().backward()
        optimizer.step()
        assert optimizer.steps == 1


def test_a_backward_that_failed_holds_nothing(tmp_path):
    """Its activations would stay until the thread's next backward."""
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
        with pytest.raises(ValueError):  # noqa: PT011 - of the hook
            z.sum().backward()
        assert kept
        del y, z
        optimizer.zero_grad()
        assert not kept
