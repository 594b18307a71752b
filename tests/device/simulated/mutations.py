"""Takes one wait of the device room away, so that a test can show that it is needed and that its lack is seen."""

from __future__ import annotations

import contextlib
import sys

import torch

from memascend import kernels
from memascend.activations.activations import Activations
from memascend.activations.chunks import Chunks
from memascend.device.arena import DeviceArena
from memascend.device.device import Copy, Device
from memascend.device.transfer import _Window
from memascend.grads.baton import CallerStream


def _skipped(owner, name, *callers, result=None):
    """A method does nothing where functions of these qualified names call it."""

    def take():
        before = getattr(owner, name)

        def method(self, *arguments):
            return result if sys._getframe(1).f_code.co_qualname in callers else before(self, *arguments)

        setattr(owner, name, method)

    return take


def _replaced(owner, **methods):
    """Methods are others."""
    return lambda: [setattr(owner, name, method) for name, method in methods.items()]


def _came_back_unused(self, slot, before=DeviceArena._came_back):
    slot.streams.clear()
    before(self, slot)


def _filled_from_nothing(self, *arguments, before=Chunks.fill):
    piece = before(self, *arguments)
    piece.chunk.source = None
    return piece


def _given_as_it_is(self, piece, target, after, before=Chunks.give):
    if piece.chunk is not None and piece.chunk.source is not None:
        piece.chunk.copy = None
    return before(self, piece, target, after)


def _found_at_once(sums, before=kernels.found_in):
    host = torch.zeros(sums.shape, dtype=sums.dtype, device="cpu").pin_memory()
    return before(host.copy_(sums, non_blocking=True))


# Each with the functions that wait, as `file:function`, and the way to take the wait away.
WAITS = {
    # upload
    "compute after upload": (
        ["transfer:Staging.waited"],
        _skipped(Copy, "order", "Staging.waited", "Staging.order"),
    ),
    "another stream after upload": (
        ["transfer:Staging.order", "unit_memory:DeviceUnits.used"],
        _skipped(Copy, "order", "Staging.order"),
    ),
    "a chunk's next read after its copy": (
        ["transfer:Staging._recycle"],
        _skipped(Copy, "done", "Staging._recycle", result=True),
    ),
    "the end after uploads": (["transfer:Staging.close"], _skipped(Copy, "wait", "Staging.close")),
    # download
    "a gradient's copy after the gradient": (
        ["transfer:DeviceEngine._lend", "device:Device.take", "device:Device._copied"],
        _replaced(Device, take=lambda self, source, target, _: self._copied(self._outward, source, target, ())),
    ),
    "an update after its gradient's copy": (
        ["transfer:DeviceEngine._window", "transfer:_Window.wait"],
        _skipped(_Window, "wait", "DeviceEngine._window"),
    ),
    "the end after downloads": (["transfer:_Window.let_go"], _skipped(_Window, "wait", "_Window.let_go")),
    "an optimizer's own code after the gradient": (
        ["transfer:DeviceEngine._order"],
        _skipped(Copy, "order", "DeviceEngine._order"),
    ),
    # reuse of the arena, memory of units
    "a slot's next upload after its use": (
        ["arena:DeviceArena._came_back", "device:Device.bring"],
        _replaced(DeviceArena, _came_back=_came_back_unused),
    ),
    "the first upload after other uses of the memory": (
        ["arena:DeviceArena._take"],
        _replaced(DeviceArena, after=lambda *_: []),
    ),
    "a slot's uses by all streams": (["arena:DeviceArena.used"], _replaced(DeviceArena, used=lambda *_: False)),
    "the arena's memory after its uses": (["arena:DeviceArena.used"], _skipped(Device, "keep_for", "DeviceArena.used")),
    "added memory after its uses": (["arena:DeviceArena._take"], _skipped(Device, "keep_for", "DeviceArena._take")),
    # activations
    "a checkpoint's copy after what it saves": (
        ["activations:Activations._save", "activations:Activations._mark"],
        _skipped(Activations, "_mark", "Activations._save", result=[]),
    ),
    "a checkpoint's memory after its copy": (
        ["chunks:ActivationChunk.end_copy"],
        _replaced(Chunks, fill=_filled_from_nothing),
    ),
    "memory for a checkpoint after its last use": (
        ["activations:Activations._bring"],
        _skipped(Activations, "_mark", "Activations._bring", result=[]),
    ),
    "a checkpoint's way back after its way out": (["chunks:Chunks.give"], _replaced(Chunks, give=_given_as_it_is)),
    "compute after a checkpoint's copy": (
        ["activations:Activations.restore"],
        _skipped(Copy, "order", "Activations.restore"),
    ),
    "storage after a checkpoint's copy": (["chunks:Chunks._write"], _skipped(Chunks, "_copied", "Chunks._write")),
    "a chunk's next use after its copy": (["chunks:Chunks._empty"], _skipped(Chunks, "_copied", "Chunks._empty")),
    "memory of a checkpoint that failed after its copy": (
        ["activations:Activations._bring"],
        _skipped(Copy, "wait", "Activations._bring"),
    ),
    "the end after checkpoints' copies": (["chunks:Chunks.close"], _skipped(Copy, "wait", "Chunks.close")),
    # commit
    "a step after its norm": ([], _replaced(kernels, found_in=_found_at_once)),
    "a sum after its parts of other streams": (
        [],
        _replaced(CallerStream, take=lambda *_: None, entered=lambda _: contextlib.nullcontext()),
    ),
}


def take_away(name):
    """Take a wait away, in this process; None: nothing."""
    if name is not None:
        WAITS[name][1]()


def names():
    """All of them, and the functions that have them."""
    return {name: functions for name, (functions, _) in WAITS.items()}
