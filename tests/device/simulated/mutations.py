"""Takes one wait of the device room away, so that a test can show that it is needed and that its lack is seen."""

from __future__ import annotations

import sys

from memascend.activations.activations import Activations
from memascend.activations.chunks import Chunks
from memascend.device.arena import DeviceArena
from memascend.device.device import Cuda, _Event
from memascend.device.transfer import _Window
from memascend.device.unit_memory import DeviceUnits


def _skipped(owner, name, callers, result=None):
    """Let a method do nothing where functions of these names call it."""
    before = getattr(owner, name)

    def method(self, *arguments):
        return result if sys._getframe(1).f_code.co_name in callers else before(self, *arguments)

    setattr(owner, name, method)


def _chunks_are_read_into_at_once():
    _skipped(_Event, "done", {"_recycle"}, True)


def _slots_are_written_at_once():
    before = DeviceArena._came_back
    DeviceArena._came_back = lambda self, slot, _: before(self, slot, {})


def _fresh_memory_is_written_at_once():
    DeviceArena.after = lambda _self, _tensor: []


def _uses_are_forgotten():
    DeviceUnits.used = lambda _self, _base: None


def _downloads_come_at_once():
    Cuda.take = lambda self, source, target, _: self._copied(self._outward, source, target, ())


def _windows_are_read_at_once():
    _Window.wait = lambda self: setattr(self, "copy", None)


def _memory_is_kept_for_nobody():
    Cuda.keep_for = lambda _self, _memory, _stream: None


def _sources_are_let_go():
    before = Chunks.fill

    def fill(self, *arguments):
        piece = before(self, *arguments)
        piece.chunk.source = None
        return piece

    Chunks.fill = fill


def _copies_come_back_at_once():
    Chunks.give = _without_own_copy(Chunks.give)


def _without_own_copy(give):
    def changed(self, piece, target, after):
        if piece.chunk is not None and piece.chunk.source is not None:
            piece.chunk.copy = None
        return give(self, piece, target, after)

    return changed


WAITS = {
    "compute after upload": lambda: _skipped(_Event, "order", {"waited", "order"}),
    "another stream after upload": lambda: _skipped(_Event, "order", {"order"}),
    "a chunk's next read after its copy": _chunks_are_read_into_at_once,
    "a slot's next upload after its use": _slots_are_written_at_once,
    "the first upload after other uses of the memory": _fresh_memory_is_written_at_once,
    "a slot's uses by all streams": _uses_are_forgotten,
    "the arena's memory after its uses": _memory_is_kept_for_nobody,
    "a gradient's copy after the gradient": _downloads_come_at_once,
    "an update after its gradient's copy": _windows_are_read_at_once,
    "a checkpoint's copy after what it saves": lambda: _skipped(Activations, "_mark", {"_save"}, []),
    "a checkpoint's memory after its copy": _sources_are_let_go,
    "memory for a checkpoint after its last use": lambda: _skipped(Activations, "_mark", {"_bring"}, []),
    "a checkpoint's way back after its way out": _copies_come_back_at_once,
    "compute after a checkpoint's copy": lambda: _skipped(_Event, "order", {"restore"}),
}


def take_away(name):
    """Take a wait away, in this process."""
    WAITS[name]()


def names():
    """All of them."""
    return list(WAITS)
