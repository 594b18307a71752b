"""Starts programs that a test kills and starts again. A life is the time from one start of a process until it ends.

`Running` starts a command that the test watches. `life` runs a command to its end, or kills it once its output contains
certain words. `forked_life` runs a function in a fork.
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
# Time limit for one life, in seconds. It is long enough for a busy machine.
SECONDS_MAX = 250


def environment():
    """Returns the environment for a program that imports `support` and computes with one thread."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


class Running:
    """A command that runs in a new process session, and writes its output to `file`."""

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
        """Waits until the output contains `words` at least `count` times, or the command has ended.

        Raises AssertionError after `SECONDS_MAX`.
        """
        until = time.monotonic() + SECONDS_MAX
        while self.output().count(words) < count and self.process.poll() is None:
            assert time.monotonic() < until, f"no {words!r} in the output within {SECONDS_MAX} s\n{self.output()}"
            time.sleep(0.005)

    def kill(self, by=signal.SIGKILL):
        """Sends the signal `by` to the process group of the command."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, by)

    def ended(self):
        """Waits for the command to end; returns its exit status and its output.

        After `SECONDS_MAX`, kills the session and raises AssertionError.
        """
        try:
            return self.process.wait(SECONDS_MAX), self.output()
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the command did not end within {SECONDS_MAX} s\n{self.output()}") from None


def life(command, *, kill=None, after=0.0, by=signal.SIGKILL, ends=0, cwd=None, **variables):
    """Runs a command to its end, or kills it at the point that `kill` describes; returns the command's output.

    Args:
        command: the words of the command.
        kill: the arguments of `Running.wait_for`: a text and, optionally, a count (1 by default). `life` kills the
            command once its output contains the text that many times. None: `life` does not kill the command.
        after: seconds between the last output of this text and the kill.
        by: the signal of the kill.
        ends: the required exit status, or several allowed statuses. With several, `life` returns the exit status and
            the output.
        cwd: the folder in which the command runs.
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
    """Calls `do(begun)` in a fork. Kills the fork `seconds` seconds after `do` calls `begun()`.

    If `seconds` is None, does not kill the fork. Returns True if the fork was killed.
    """
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
        # The parent has not waited for the child yet, so the pid of the child cannot belong to another process.
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0
