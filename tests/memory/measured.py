"""Trains a model, and prints the memory that the process held before, during and after the training.

The fixture `measure` runs `main` in a separate process. `WORK` has the options of `main`.
"""

import contextlib
import copy
import ctypes
import gc
import itertools
import json
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memascend

VOCABULARY = 12_288
SQUARES = 8

WORK = {
    "blocks": 4,
    "width": 512,
    "vocabulary": VOCABULARY,
    "tokens": 32,
    "dtype": "float32",
    "checkpoint": True,
    "steps": 3,
    "options": {},  # keyword arguments of offload()
    "storage": None,
    "in_heap": False,  # the model is made in the C library's heap, as happens after a large tensor was freed
    "meta": False,  # the model is made on the meta device
    "buffer_bytes": 0,  # the size of a persistent buffer
    "resume": False,  # the run resumes an existing store that has one step
    "phases": False,  # the run also makes the calls in the function `others`
    "cgroup": None,  # a memory cgroup that the process joins; `lower` sets the cgroup's limit after offload()
    "grow_bytes": 0,  # `lower` sets the cgroup's limit this many bytes above the cgroup's anonymous memory
}


class Block(nn.Module):
    """A block with many small gradients of equal size.

    The peak of memory then depends little on the number of gradients that are queued.
    """

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.squares = nn.ModuleList(nn.Linear(width, width) for _ in range(SQUARES))

    def forward(self, x):
        inner = self.norm(x)
        for square in self.squares:
            inner = square(inner).relu()
        return x + inner


class Model(nn.Module):
    def __init__(self, blocks, width, recompute, vocabulary=VOCABULARY):
        super().__init__()
        self.first = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 16)
        self.recompute = recompute

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.last(x)


def status():
    """Returns the memory figures of this process (VmRSS, VmHWM, RssAnon and others), in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}


class Sampler:
    """Samples the peak of anonymous memory. The peak that the kernel reports would also count pages of files."""

    def __init__(self):
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        # The file object has no buffer, and one call reads the whole file, so sampling allocates almost no memory.
        with open("/proc/self/status", "rb", buffering=0) as file:
            while not self._over.wait(0.001):
                file.seek(0)
                text = file.read(4096)
                at = text.index(b"RssAnon:") + 8
                self.peak = max(self.peak, int(text[at : text.index(b"kB", at)]) << 10)

    def take(self):
        """Returns the peak since the last call of `take`."""
        peak = max(self.peak, status()["RssAnon"])
        self.peak = 0
        return peak

    def end(self):
        self._over.set()
        self._thread.join()


def activation_bytes(work, itemsize):
    """Returns the bytes of the activations that checkpointing keeps: the inputs of all blocks. 0 without it."""
    return work["blocks"] * work["tokens"] * work["width"] * itemsize if work["checkpoint"] else 0


def train(model, optimizer, batch, steps):
    for _ in range(steps):
        optimizer.backward(model(batch).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()


def warm_up(dtype, folder):
    """Trains a tiny model before the measured model.

    The first training in a process allocates memory for threads, heaps and code. This memory must not count as memory
    of the measured model.
    """
    model = Model(2, 64, recompute=True, vocabulary=64).to(dtype)
    model, optimizer = memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=folder)
    train(model, optimizer, torch.arange(8), 2)
    model.load_state_dict(model.state_dict())
    optimizer.close()


# The number of mallopt's option M_MMAP_THRESHOLD (from malloc.h), and the highest threshold that glibc itself chooses.
M_MMAP_THRESHOLD, MMAP_THRESHOLD_MAX = -3, 32 << 20


def lower(cgroup, grow_bytes):
    """Sets the cgroup's limit to `grow_bytes` above the cgroup's current anonymous memory.

    The kernel drops cached files if this is necessary to meet the limit.
    """
    first = Path(cgroup, "memory.limit_in_bytes")
    limit = first if first.exists() else Path(cgroup, "memory.max")
    stat = dict(line.split() for line in Path(cgroup, "memory.stat").read_text().splitlines())
    held = int(stat["rss"] if "rss" in stat else stat["anon"])
    limit.write_text(str(held + grow_bytes))


def offloaded(model, folder, work, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return memascend.offload(model, optimizer, storage=folder / "run", **work["options"], **options)


def prepared(work):
    """Returns the model, the folder of the run, and the memory figures from before the model was made."""
    dtype = getattr(torch, work["dtype"])
    folder = Path(work["storage"])
    torch.manual_seed(0)
    (folder / "warm").mkdir()
    warm_up(dtype, folder / "warm")
    gc.collect()
    before = status()
    if work["cgroup"]:
        Path(work["cgroup"], "cgroup.procs").write_text("0")
    if work["in_heap"]:
        # The warm-up's offload() fixed glibc's mmap threshold. In other programs, freeing a large tensor raises this
        # threshold, so raise it here.
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_MAX)
    with torch.device("meta") if work["meta"] else contextlib.nullcontext():
        model = Model(work["blocks"], work["width"], work["checkpoint"], work["vocabulary"]).to(dtype)
    if work["buffer_bytes"]:
        model.register_buffer("seen", torch.ones(work["buffer_bytes"] // 4))
    return model, folder, before


def main(given):
    work = {**WORK, **given}
    unknown = set(given) - set(WORK)
    assert not unknown, unknown
    model, folder, before = prepared(work)
    counts = {
        "model_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "parameters": len(list(model.parameters())),
        "activation_bytes": activation_bytes(work, getattr(torch, work["dtype"]).itemsize),
    }
    batch = torch.randint(0, work["vocabulary"], (work["tokens"],))
    (folder / "run").mkdir()
    if work["resume"]:
        begun = copy.deepcopy(model)
        train(*offloaded(begun, folder, work), batch, 1)
        begun._memascend.close()
        del begun
        gc.collect()
    made = status()
    model, optimizer = offloaded(model, folder, work, existing="resume" if work["resume"] else "refuse")
    after = status()
    if work["cgroup"]:
        lower(work["cgroup"], work["grow_bytes"])
    sampler = Sampler()
    peaks = {}

    def phase(name):
        peaks[name] = sampler.take()

    train(model, optimizer, batch, work["steps"])
    phase("train")
    trained = status()
    report = optimizer.report().to_dict()
    if work["phases"]:
        others(model, optimizer, batch, phase)
    plan = optimizer.plan
    optimizer.close()
    phase("close()")
    sampler.end()
    output = {
        "before": before,
        "made": made,
        "after": after,
        "trained": trained,
        "peaks": peaks,
        **counts,
        "plan": {"host": plan.host, "host_peak": plan.host_peak},
        "report": report,
    }
    print(json.dumps(output))


def others(model, optimizer, batch, phase):
    """Calls other functions that a user may call after training. Measures each call as a phase."""
    state = model.state_dict()
    phase("state_dict()")
    model.load_state_dict(state)
    phase("load_state_dict() of the same")
    # Loads one block at a time, because new values for all blocks would need as much memory as the model.
    for _, names in itertools.groupby(state, lambda name: name.split(".")[:2]):
        model.load_state_dict({name: state[name] * 0.5 for name in names}, strict=False)
    phase("load_state_dict() of others")
    del state
    with memascend.materialized(model, modify=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    phase("materialized()")
    optimizer.load_state_dict(optimizer.state_dict())
    phase("optimizer.load_state_dict()")
    train(model, optimizer, batch, 1)
    phase("train again")
    model(batch).float().square().mean().backward()
    phase("backward")
