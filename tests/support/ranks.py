"""Runs a function on several gloo ranks, each a process of its own; none outlives the call, also where it fails."""

import ctypes
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

__all__ = ["on_ranks", "rank_main"]

ROOT = Path(__file__).resolve().parents[2]


def on_ranks(count, function, *arguments, seconds=100, expect=0):
    """What `function(*arguments)`, of a module of tests, returned on each rank.

    Args:
        count: of ranks.
        function: is imported by its module's file and its name.
        arguments: are pickled.
        seconds: after which all are killed, and the test fails.
        expect: the exit status of every rank; None: any.
    """
    folder = Path(tempfile.mkdtemp(prefix="memascend-ranks-"))
    task = folder / "task"
    source = sys.modules[function.__module__].__file__
    task.write_bytes(pickle.dumps((source, function.__name__, arguments)))
    processes = [_start(folder, task, rank, count) for rank in range(count)]
    try:
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if expect is not None and any(process.poll() not in (None, expect) for process in processes):
                # The others wait for the one that is gone: a moment for their words, and no more.
                deadline = min(deadline, time.monotonic() + 2.0)
            time.sleep(0.01)
        ends = [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    words = [(folder / f"words-{rank}").read_text() for rank in range(count)]
    told = "\n".join(f"--- rank {rank} ended with {ends[rank]}\n{text[-4000:]}" for rank, text in enumerate(words))
    assert None not in ends, told
    assert expect is None or set(ends) == {expect}, told
    return [_result(folder / f"result-{rank}") for rank in range(count)]


def _start(folder, task, rank, count):
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with (folder / f"words-{rank}").open("w") as words:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore::FutureWarning", __file__, str(folder), str(task)],
            env=environment,
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _result(path):
    return torch.load(path, weights_only=True) if path.exists() else None


def rank_main(folder, task):
    """What each rank runs."""
    from torch import distributed

    # Where the test's own process is killed, this one goes with it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    torch.set_num_threads(1)
    source, name, arguments = pickle.loads(Path(task).read_bytes())
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = distributed.FileStore(str(Path(folder) / "meeting"), count)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    namespace = _imported(source)
    result = getattr(namespace, name)(*arguments)
    torch.save(result, Path(folder) / f"result-{rank}")
    distributed.destroy_process_group()


def _imported(source):
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    rank_main(*sys.argv[1:])
