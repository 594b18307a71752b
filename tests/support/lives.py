"""Starts runs that a test kills and starts again: a life is one process with its child processes, or one fork.

`Running` is a life that the test watches. `life` runs a command to its end, or kills it once its output has certain
words.
"""

import os
import signal
import subprocess
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

__all__ = ["Running", "environment", "forked_life", "life"]

TESTS = Path(__file__).resolve().parents[1]
# The limit for one life, long enough for a busy machine.
SECONDS_MAX = 250


def environment():
    """Returns the environment of programs that import `support` and compute with one thread."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


class Running:
    """A command that runs in a session of its own and writes its output to `file`."""

    def __init__(self, command, file, *, cwd=None, **variables):
        own = {**environment(), "PYTHONUNBUFFERED": "1"}
        self._file = file
        with file.open("w") as output:
            self.process = subprocess.Popen(
                [*map(str, command)],
                cwd=cwd,
                env=own | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self):
        """Returns the output of all processes of the session so far."""
        return self._file.read_text(errors="replace")

    def wait_for(self, words, count=1):
        """Waits until the output has `words` `count` times, or the command has ended."""
        until = time.monotonic() + SECONDS_MAX
        while self.output().count(words) < count and self.process.poll() is None:
            assert time.monotonic() < until, f"no {words!r} in the output within {SECONDS_MAX} s\n{self.output()}"
            time.sleep(0.005)

    def kill(self, by=signal.SIGKILL):
        """Sends a signal to all processes of the session."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, by)

    def ended(self):
        """Waits for the command to end; returns its exit status and its output."""
        try:
            return self.process.wait(SECONDS_MAX), self.output()
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the command did not end within {SECONDS_MAX} s\n{self.output()}") from None


def life(command, *, kill=None, after=0.0, by=signal.SIGKILL, ends=0, cwd=None, **variables):
    """Runs a command to its end, or until it is killed; returns its output.

    Args:
        command: the words of the command.
        kill: words and a count: `life` kills the command once its output has the words that often (None: no kill).
        after: seconds between the output of these words and the kill.
        by: the signal of the kill.
        ends: the required exit status, or several allowed ones: then `life` returns the status and the output.
        cwd: the folder that the command runs in.
        variables: additions to the command's environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = Running(command, Path(folder, "output"), cwd=cwd, **variables)
        try:
            if kill is not None:
                running.wait_for(*kill)
                time.sleep(after)
                running.kill(by)
            status, output = running.ended()
        finally:
            running.kill()
    is_one = isinstance(ends, int)
    assert status in ([ends] if is_one else ends), f"status {status}\n{output[-6000:]}"
    return output if is_one else (status, output)


def forked_life(do, seconds=None):
    """Calls `do(begun)` in a fork and kills the fork `seconds` after it calls `begun()`; True if it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            do(lambda: os.write(writing, b"x"))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    # If the child fails before it calls `begun()`, the pipe closes and the read returns nothing.
    if os.read(reading, 1) and seconds is not None:
        time.sleep(seconds)
        # The child has not been waited for, so its pid cannot belong to another process yet.
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0
