"""Detects other threads of this process that could touch parameters."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# Threads of these packages carry out their own work, and never touch a model: progress bars, loaders, debuggers.
_HELPERS = ("torch", "tqdm", "multiprocessing", "ipykernel", "execnet", "memascend")


_local = threading.local()


def current() -> int:
    """The thread that uses parameters here: this one, or the one that it works for, which waits meanwhile."""
    return getattr(_local, "works_for", 0) or threading.get_ident()


def works_for_another() -> bool:
    """Whether this thread computes a micro-batch for another one, as others do by turns."""
    return hasattr(_local, "works_for")


@contextmanager
def working_for(thread: int) -> Iterator[None]:
    """Inside, what this thread binds is bound for another one, which waits."""
    _local.works_for = thread
    try:
        yield
    finally:
        del _local.works_for


def is_autograds() -> bool:
    """Whether this is a thread of autograd's, which computes a backward while the one that began it waits."""
    return bool(torch._C._current_graph_task_id() != -1) and isinstance(  # noqa: SLF001
        threading.current_thread(),
        threading._DummyThread,  # noqa: SLF001
    )


def others_alive(waits: int | None = None) -> bool:
    """Whether a thread runs beside this one that is not known to be a library's helper.

    Args:
        waits: the thread that waits for this one, where this one is autograd's.
    """
    if threading.active_count() == 1:
        return False
    here = {threading.get_ident(), current()}
    if waits is not None and is_autograds():
        here.add(waits)
    others = [thread for thread in threading.enumerate() if thread.ident not in here and not _is_helper(thread)]
    return bool(others) and not _compilers().issuperset(others)


def _compilers() -> set[threading.Thread]:
    """The threads that torch.compile keeps: a pool like any other, which runs nothing but compilers."""
    loaded = sys.modules.get("torch._inductor.async_compile")
    found: set[threading.Thread] = set()
    for name in ("pool", "thread_pool"):
        made = getattr(getattr(loaded, "AsyncCompile", None), name, None)
        if made is not None and hasattr(made, "cache_info") and made.cache_info().currsize:
            found |= getattr(made(), "_threads", set())
    return found


def _is_helper(thread: threading.Thread) -> bool:
    if isinstance(thread, threading._DummyThread):  # noqa: SLF001
        # Begun outside of Python, as autograd's and ours are.
        return True
    module = getattr(getattr(thread, "_target", None), "__module__", None) or type(thread).__module__
    return module.partition(".")[0] in _HELPERS
