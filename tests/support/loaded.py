"""Forks programs from an interpreter that has already loaded torch.

Loading torch and what an optimizer needs of it takes some seconds of a processor, more than most such programs.
A program that depends on how its interpreter starts (its environment, what is imported first) needs a new one. Where a
test asks how the interpreter ends, the program ends `whole`.
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

# The heap is as glibc has it, whatever the one who runs the tests prefers: some programs measure it.
HEAP = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
# What torch says once where there is none, which nothing here needs.
NO_NUMPY = "ignore:Failed to initialize NumPy"
# Loading torch takes that long on no machine, however busy.
BEGINS_WITHIN = 600


class Done(NamedTuple):
    """How a program ended, and what it said."""

    status: int
    out: str
    err: str


class Loaded:
    """The interpreter that programs are forked from, one after the other; a new one after one that had no end."""

    def __init__(self, environment=None, modules=(), warnings=("error", NO_NUMPY)):
        """An interpreter that begins with this environment (None: with the caller's) and loads these modules, too.

        Its programs take warnings as these options of `python -W` say.
        """
        self._environment = environment
        self._modules = modules
        self._warnings = [word for option in warnings for word in ("-W", option)]
        self._process = None

    def run(self, program, *arguments, env, timeout, whole=False):
        """Runs a program as `python -c` would, and waits for its end; see `end` for one that is not `whole`."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
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
                raise AssertionError(f"no end after {timeout} s\n{out.read_text()}\n{err.read_text()}") from None
            except BaseException:
                # Whoever asks next would be told of this program.
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
        """The next number that is said."""
        line, until = b"", time.monotonic() + timeout
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError
            said = os.read(self._process.stdout.fileno(), 1)
            assert said, "the loaded interpreter ended"
            line += said
        return int(line)

    def close(self):
        """Ends it, and the program that it may be waiting for."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


def die_with_parent():
    """Ends this process when the one that began it ends, however that does."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def forked():
    """Forks for each program that is asked for: returns what is to be run, in the child; ends the parent at the end."""
    while line := sys.stdin.buffer.readline():
        # What is not yet flushed would be said twice.
        sys.stdout.flush()
        with warnings.catch_warnings():
            # From 3.12 on Python warns where other threads are: those of a library that was loaded and did nothing.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            return json.loads(line)
        print(0, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)


def become(wanted):
    """Takes the folder, the files, the environment and the arguments of a program."""
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
    """Ends a program as its interpreter would, but takes apart no module except the program's: half a second less."""
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
    # What is loaded by now is not searched for garbage, which would copy its pages in each program.
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
        # After an error, too, the interpreter takes apart what was loaded.
        gc.unfreeze()
