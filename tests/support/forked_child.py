"""Calls a function in a forked child and returns the function's result or error as text.

The call fails if the child hangs or dies.
"""

import faulthandler
import os
import select
import signal
import sys
import time

# Time limit for a child, in seconds. The limit allows for a busy machine: on an idle machine, a child takes less than a
# second.
ENDS_WITHIN = 120


def in_child(function, fork=os.fork):
    """Calls `function` in a child. Returns the result as text, or the name and message of the error that was raised."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        # The parent sends SIGUSR1 to a child that hangs. The child then prints the stacks of its threads.
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
        try:
            output = str(function())
        except BaseException as error:
            output = f"{type(error).__name__}: {error}"
        os.write(writing, output.encode())
        os._exit(0)
    os.close(writing)
    output = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], ENDS_WITHIN)[0]:
            piece = pipe.read(1 << 16)
            if not piece:
                break
            output += piece
        else:
            os.kill(child, signal.SIGUSR1)
            time.sleep(1)
            os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status} after {output.decode()!r}"
    return output.decode()
