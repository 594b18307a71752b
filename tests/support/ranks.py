"""Runs a function on several gloo ranks, one process each; no rank outlives the call, even if the call fails.

One process imports torch for all calls. For each call, this process forks a second process, which imports the
function's module and then forks the ranks. This saves time: importing torch takes longer than most of the functions.
"""

import contextlib
import functools
import importlib.util
import inspect
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from support.lives import environment
from support.loaded import Loaded, die_with_parent

__all__ = ["on_ranks", "ranks"]

# Once a rank has failed, the other ranks may still run and print for this number of seconds.
LAST_WORDS_SECONDS = 2.0
PROGRAM = """
import sys
from pathlib import Path
from support.ranks import run
run(Path(sys.argv[1]))
"""


def on_ranks(count, function, folder, *arguments, seconds=100, ends=(0,)):
    """Runs `function(str(folder), *arguments)` on each rank; returns the results, with None for a rank that was killed.

    Args:
        count: number of ranks.
        function: a function at the top level of a module. The process that forks the ranks imports the module from its
            file, and finds the function by name.
        folder: the folder that the ranks may write to.
        arguments: the arguments of the function after `str(folder)`. `on_ranks` pickles them.
        seconds: time limit. After this time, `on_ranks` kills all ranks and raises AssertionError.
        ends: the allowed exit statuses of a rank. The status of a rank that signal N killed is -N.
    """
    place = folder / f"ranks-{len(list(folder.glob('ranks-*')))}"
    place.mkdir(parents=True)
    source = sys.modules[function.__module__].__file__
    (place / "task").write_bytes(pickle.dumps((source, function.__name__, (str(folder), *arguments), count)))
    words = ""
    try:
        done = _loaded().run(PROGRAM, str(place), env=environment(), timeout=seconds)
        words = done.out + done.err
    except AssertionError as error:
        words = str(error)
    finally:
        # Kills the process that runs the ranks, and the ranks, even if the test failed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.killpg(int((place / "group").read_text()), signal.SIGKILL)
    answer = "\n".join([words, *(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in place.glob("words-*"))])
    found = place / "ends"
    assert found.exists(), f"the ranks did not end within {seconds} s\n{answer}"
    status = pickle.loads(found.read_bytes())
    assert set(status) <= set(ends), f"{status}\n{answer}"
    return [_result(place / f"result-{rank}") for rank in range(count)]


def ranks(count):
    """Decorates a test function so that each of `count` ranks runs it.

    Each rank passes a folder and the values of the test's parameters to the function.
    """

    def decorate(function):
        def test(tmp_path, **given):
            on_ranks(count, function, tmp_path, *given.values())

        _, *others = inspect.signature(function).parameters.values()
        tmp_path = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([tmp_path, *others])
        test.of_a_rank = function
        return test

    return decorate


@functools.cache
def _loaded():
    """Returns an interpreter that imports the modules that all ranks need, and that ends with this process."""
    modules = ["torch.distributed.fsdp", "pytest", "memascend.session.offload"]
    return Loaded(environment(), modules, warnings=())


def _result(path):
    return torch.load(path, weights_only=True) if path.exists() else None


def _imported(source):
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(place):
    """Forks the ranks and waits until they end.

    Kills the remaining ranks `LAST_WORDS_SECONDS` after a rank has failed, or once signals have stopped all of them.
    """
    # If the test's own process is killed, the kernel kills this process and the ranks.
    die_with_parent()
    os.setpgid(0, 0)
    (place / "group").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    source, name, arguments, count = pickle.loads((place / "task").read_bytes())
    found = getattr(_imported(source), name)
    function = getattr(found, "of_a_rank", found)
    running = {_forked(place, rank, count, function, arguments): rank for rank in range(count)}
    ends = [None] * count
    deadline, hanging = None, set()
    while running:
        process, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if process and os.WIFSTOPPED(status):
            hanging.add(process)
        elif process:
            rank = running.pop(process)
            ends[rank] = os.waitstatus_to_exitcode(status)
            if ends[rank] > 0 and deadline is None:
                deadline = time.monotonic() + LAST_WORDS_SECONDS
        elif running.keys() <= hanging or (deadline is not None and time.monotonic() > deadline):
            for left in running:
                os.kill(left, signal.SIGKILL)
            deadline, hanging = None, set()
        else:
            time.sleep(0.01)
    unfinished = place / "ends-unfinished"
    unfinished.write_bytes(pickle.dumps(ends))
    unfinished.rename(place / "ends")


def _forked(place, rank, count, function, arguments):
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        die_with_parent()
        # In a fork, the first use of torch's thread pool creates a new pool. If two threads create the pool at the same
        # time, the creation fails. So the call below creates the pool now.
        torch.set_num_threads(1)
        with (place / f"words-{rank}").open("w") as words:
            os.dup2(words.fileno(), 1)
            os.dup2(words.fileno(), 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
        distributed = torch.distributed
        meeting = distributed.FileStore(str(place / "meeting"), count)
        distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=count)
        torch.save(function(*arguments), place / f"result-{rank}")
        distributed.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
