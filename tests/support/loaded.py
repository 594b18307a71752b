"""Runs programs in forks of an interpreter that has already loaded torch.

Loading torch takes some seconds of processor time, which is more than most of these programs take. Some programs depend
on how their interpreter starts (environment, order of imports). Such a program needs a new interpreter instead of a
fork. A test that checks how the interpreter ends passes `whole=True`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from pathlib import Path
from typing import NamedTuple

# Variables that configure glibc's heap. Some programs measure the heap, so the interpreter starts without these
# variables.
HEAP = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
# torch warns once if numpy is missing; the programs do not need numpy.
NO_NUMPY = "ignore:Failed to initialize NumPy"
# Time limit for loading torch, in seconds. Loading torch takes less than this, even on a busy machine.
BEGINS_WITHIN = 600


class Done(NamedTuple):
    """The exit status and the output of a program."""

    status: int
    out: str
    err: str


class Loaded:
    """An interpreter that forks one program at a time. After an error in `run`, the next `run` starts a new one."""

    def __init__(self, environment=None, modules=(), warnings=("error", NO_NUMPY)):
        """Stores how the first `run` starts the interpreter.

        `environment` has the environment variables of the interpreter. None: the variables of this process. The
        interpreter imports `modules` in addition to torch. `warnings` are the values of its options `-W`.
        """
        self._environment = environment
        self._modules = modules
        self._warnings = [word for option in warnings for word in ("-W", option)]
        self._process = None

    def run(self, program, *arguments, env, timeout, whole=False):
        """Runs a program as `python -c` would; returns its `Done`. Raises AssertionError after `timeout` seconds.

        Also raises AssertionError if the program does not begin within `BEGINS_WITHIN` seconds. If the program runs to
        its last line and `whole` is false, `end` replaces Python's shutdown.
        """
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            out.touch()
            err.touch()
            wanted = {
                "program": program,
                "arguments": arguments,
                "folder": os.getcwd(),
                "environment": env,
                "whole": whole,
                "out": str(out),
                "err": str(err),
            }
            try:
                self._begin(wanted)
                status = self._number(timeout)
            except TimeoutError:
                self.close()
                raise AssertionError(
                    f"the program did not begin within {BEGINS_WITHIN} s, or did not end within {timeout} s\n"
                    f"{out.read_text()}\n{err.read_text()}"
                ) from None
            except BaseException:
                # Without close(), the next `run` would read this program's status.
                self.close()
                raise
            return Done(status, out.read_text(), err.read_text())

    def _begin(self, wanted):
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, *self._warnings, __file__, *self._modules],
                env={name: value for name, value in (self._environment or os.environ).items() if name not in HEAP},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        assert self._number(BEGINS_WITHIN) == 0

    def _number(self, timeout):
        """Reads the next number that the interpreter prints; raises TimeoutError after `timeout` seconds."""
        line, until = b"", time.monotonic() + timeout
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError
            output = os.read(self._process.stdout.fileno(), 1)
            assert output, "the interpreter that runs the programs ended"
            line += output
        return int(line)

    def close(self):
        """Kills the interpreter and the program that it may be running."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


def die_with_parent():
    """Makes the kernel kill this process when its parent process ends, even if the parent is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def forked():
    """Forks a child for each request on stdin, and returns the request in the child.

    The parent prints 0 once it has forked, then the exit status of the child. The parent exits when stdin closes.
    """
    while line := sys.stdin.buffer.readline():
        # Without this flush, the child would also print the text that this process has buffered.
        sys.stdout.flush()
        with warnings.catch_warnings():
            # Python 3.12 and later warn if a process with several threads forks. Here the fork is safe: the other
            # threads of this process are idle threads of loaded libraries.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            return json.loads(line)
        print(0, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)


def become(wanted):
    """Gives this process the folder, output files, environment and arguments of the program `wanted`."""
    os.chdir(wanted["folder"])
    writing = os.O_WRONLY | os.O_CREAT
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, wanted["out"], writing), (2, wanted["err"], writing)):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    tempfile.tempdir = None
    sys.argv = ["-c", *wanted["arguments"]]
    sys.path[0] = ""


def end():
    """Ends the process like Python's shutdown, but destroys only the program's module. This saves half a second."""
    threading._shutdown()
    atexit._run_exitfuncs()
    del sys.modules["__main__"]
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    die_with_parent()
    import torch._dynamo  # noqa: F401 - each optimizer loads it

    for module in sys.argv[1:]:
        importlib.import_module(module)
    # Freezes the loaded objects. Otherwise a garbage collection in a fork would write to the memory pages of these
    # objects, and the kernel would copy the pages.
    gc.collect()
    gc.freeze()
    wanted = forked()
    become(wanted)
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(wanted["program"], "<string>", "exec", dont_inherit=True), vars(sys.modules["__main__"]))  # noqa: S102
        if not wanted["whole"]:
            end()
    finally:
        # Python's shutdown collects the loaded objects, also after an error. Frozen objects could not be collected.
        gc.unfreeze()
