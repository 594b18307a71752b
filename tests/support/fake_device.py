"""A fake device in host memory: copies late, and spoils what nobody may rely on.

Computing is the caller's own thread, so that its "stream" is whatever it does next, and to come after a copy is to wait
for it. Copies run on one thread for each direction, later than they were asked for. What is being copied is spoilt at
its target at once: who does not order what it does after the copy sees it. What nobody holds is spoilt as well.

With `fills`, new memory is that of somebody whose work has not ended: it is spoilt that much later, on the stream of
whoever asked for it. Marks come after that, as all that is begun there.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time

import pytest
import torch

from memascend.device import device
from memascend.device.arena import DeviceArena
from memascend.device.device import CAPTURED
from memascend.errors import UsageError
from memascend.plan import options as config

# NaN in every floating type, and nothing that an integer is likely to be.
SPOILT = 0xFF


class Work:
    """A `Copy`."""

    def __init__(self, do=None):
        self.do = do
        self.over = threading.Event()
        self.error = None
        if do is None:
            self.over.set()

    def run(self):
        try:
            self.do()
        except BaseException as error:
            self.error = error
        self.do = None
        self.over.set()

    def done(self):
        return self.over.is_set()

    def wait(self):
        assert self.over.wait(60), "a copy never ended"
        if self.error is not None:
            raise self.error

    order = wait


class Direction:
    """A stream of copies."""

    def __init__(self, delay):
        self.delay = delay
        self.waiting = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while (work := self.waiting.get()) is not None:
            time.sleep(self.delay)
            work.run()

    def copy(self, source, target, after):
        assert source.is_contiguous()
        assert source.nbytes == target.nbytes
        target.fill_(SPOILT)

        def do():
            for before in after:
                before.wait()
            target.copy_(source)

        work = Work(do)
        self.waiting.put(work)
        return work


class Fake:
    """A `Device`."""

    torch_device = torch.device("cpu")

    def __init__(self, delay=0.0005, fills=0.0):
        self.inward, self.outward = Direction(delay), Direction(delay)
        # What was begun on the stream that computes, and is not over.
        self.computing = Direction(fills)
        self.begun = Work()
        self.brought = self.taken = 0
        self.marks = 0
        # Whether the stream that computes is being captured into a graph.
        self.captures = False
        # Lets a test make a copy fail.
        self.fails = None

    def memory(self, nbytes):
        whole = torch.full((nbytes + 4096,), SPOILT, dtype=torch.uint8)
        start = -whole.data_ptr() % 4096
        return self.fill(whole[start : start + nbytes])

    def fill(self, memory):
        """Spoil memory, later."""
        if self.computing.delay:
            self.begun = Work(lambda: memory.fill_(SPOILT))
            self.computing.waiting.put(self.begun)
        return memory

    def lent(self, memory, start, nbytes, owner):
        bytes_there = (ctypes.c_uint8 * nbytes).from_address(memory.data_ptr() + start)
        # What torch makes of it holds it.
        bytes_there.owner = owner
        return torch.frombuffer(bytes_there, dtype=torch.uint8)

    def keep_for(self, memory, stream):
        pass

    def enter_thread(self):
        pass

    def require_no_capture(self):
        if self.captures:
            raise UsageError(CAPTURED)

    def stream(self):
        return "the only one"

    def mark(self, stream):
        assert stream == "the only one"
        self.marks += 1
        # Whatever the caller's thread computed is over when it returns.
        return self.begun

    def bring(self, source, target, after):
        if self.fails is not None:
            raise self.fails
        self.brought += source.nbytes
        return self.inward.copy(source, target, after)

    def take(self, source, target, after):
        if self.fails is not None:
            raise self.fails
        self.taken += source.nbytes
        return self.outward.copy(source, target, after)

    def free(self):
        return 0

    def allocated(self):
        return 0, 0

    def end(self):
        for direction in (self.inward, self.outward, self.computing):
            direction.waiting.put(None)
            direction.thread.join(60)
            assert not direction.thread.is_alive()


def spoilt_first(self, slot, came_back=DeviceArena._came_back):
    if isinstance(self._device, Fake):
        slot.memory[slot.start : slot.start + slot.nbytes].fill_(SPOILT)
    came_back(self, slot)


DeviceArena._came_back = spoilt_first


@pytest.fixture
def fake(monkeypatch):
    """Every `offload()` computes on it."""
    made = Fake(fills=0.05)
    monkeypatch.setattr(device, "open_device", lambda _: made)
    # Whatever a call asks for, it is asked of this one.
    monkeypatch.setattr(config.Options, "where", torch.device("cuda"))
    yield made
    made.end()
