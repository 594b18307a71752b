"""Frees what a failed backward leaves in autograd's queue, before its thread or Python ends.

Autograd keeps the nodes that it had yet to compute in a queue of the thread that began the backward. When one fails,
they stay there until that thread's next backward, and with them all that they saved: activations, and through the
saved-tensor hooks what stands for them in Python. A thread that ends without another backward frees its queue after
Python has forgotten it; the process's first thread does so after the interpreter has gone, which ends in a crash.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading

import torch

_local = threading.local()
# Later than that, nothing of torch can be called.
_exiting = False


def let_go() -> None:
    """Free what failed backwards left in this thread; nothing while a backward runs in it."""
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001
        return
    # What belongs to no backward any more is taken from the queue before anything else is. A forked child may have no
    # autograd, where it had threads; it says so.
    with contextlib.suppress(RuntimeError), torch.inference_mode(mode=False), torch.enable_grad():
        torch.zeros((), requires_grad=True, device="cpu").backward()


class _End:
    """Held by a thread, and gone when it ends, in that thread, while it still may use Python."""

    def __del__(self) -> None:
        let_go()


def note_thread() -> None:
    """A backward may begin in this thread: look after its queue when it ends."""
    if not hasattr(_local, "end") and not _exiting:
        _register()
        _local.end = _End()


@functools.cache
def _register() -> None:
    """Once in a process."""
    atexit.register(_exit)


def _exit() -> None:
    global _exiting  # noqa: PLW0603
    _exiting = True
    # Of the first thread.
    _local.__dict__.pop("end", None)
