"""Hides a folder from a rank, as if the rank were on another host."""

import ctypes
import os
import subprocess
from pathlib import Path

from torch import distributed

__all__ = ["make_hidden"]

CLONE_NEWNS = 0x20000


def make_hidden(folder):
    """Make a folder `hidden` that the first rank alone sees; others have an empty one there. Needs root."""
    path = Path(folder, "hidden")
    path.mkdir(exist_ok=True)
    distributed.barrier()
    if distributed.get_rank():
        # Of this thread, and of the commands that it starts.
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", os.fspath(path)], check=True)
    distributed.barrier()
