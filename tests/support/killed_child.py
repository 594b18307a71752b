"""Forks a child and kills it with -9 at a chosen moment."""

import os
import signal
import time


def kill_after(seconds, child, *, begun=True):
    """Runs `child(told)` in a fork, kills it so long after it wrote to `told`, or after the fork if not `begun`."""
    hears, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(told)
        finally:
            os._exit(1)
    os.close(told)
    # What it does before it has begun takes as long as the machine is busy.
    assert not begun or os.read(hears, 1) == b"x", "the child ended by itself"
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "the child ended by itself"
    os.close(hears)
