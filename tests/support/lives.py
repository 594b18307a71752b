"""Runs that a test kills and starts again: a life is one process, with all that it starts, or one fork.

`Running` is a life that a test watches; `life` is a whole one, killed at a moment of its output or by itself.
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
# For one life, also on a machine that does ten other things.
SECONDS_MAX = 250


def environment():
    """Of programs that import what tests share, and compute by one thread."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


class Running:
    """A command that runs in a session of its own, and its output so far, which is in `file`."""

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
        """Of all of its processes."""
        return self._file.read_text(errors="replace")

    def wait_for(self, words, count=1):
        """Wait until the output has these words so many times, or the end."""
        until = time.monotonic() + SECONDS_MAX
        while self.output().count(words) < count and self.process.poll() is None:
            assert time.monotonic() < until, f"no {words!r} within {SECONDS_MAX} s\n{self.output()}"
            time.sleep(0.005)

    def kill(self, by=signal.SIGKILL):
        """Send a signal to all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, by)

    def ended(self):
        """The status and the output, at the end."""
        try:
            return self.process.wait(SECONDS_MAX), self.output()
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end within {SECONDS_MAX} s\n{self.output()}") from None


def life(command, *, kill=None, after=0.0, by=signal.SIGKILL, ends=0, cwd=None, **variables):
    """The output of one life of a command.

    Args:
        command: its words.
        kill: words, and how often the output has them before the life is ended.
        after: how many seconds later.
        by: the signal.
        ends: the status that the life must end with; or several, and then the status is returned before the output.
        cwd: where it runs.
        variables: of its environment.
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
    """Call `do(begun)` in a fork, which is killed so many seconds after it called `begun()`; whether it was killed."""
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
    # A child that failed before that closes the pipe.
    if os.read(reading, 1) and seconds is not None:
        time.sleep(seconds)
        # Nobody has waited for it, so that its number is still its own.
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0
