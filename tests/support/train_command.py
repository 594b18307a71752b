"""Runs `memascend train` in processes that a test kills; loaded, with all that it needs, where each is forked from."""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch

from memascend.checkpoint.weights import WeightFiles
from memascend.cli import main
from memascend.cli.train import job, loop, output  # noqa: F401 - loaded before the forks

__all__ = ["events", "run_ranks", "run_until", "train"]

TESTS = Path(__file__).resolve().parent.parent
# For one life of a run, also on a machine that does ten other things.
SECONDS_MAX = 280


def train(arguments, log, weights=None, environment=None):
    """The command, with its lines in a file; it kills itself when it is asked for so many weights."""
    torch.set_num_threads(1)
    os.environ.update(environment or {})
    own, calls = WeightFiles.tensor, []

    def tensor(*asked):
        calls.append(asked)
        if len(calls) == weights:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*asked)

    WeightFiles.tensor = tensor
    with open(log, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        sys.exit(main(["train", *arguments]))


def events(log, name="step"):
    """What was said of each step; what was said twice was the same but for its time."""
    found = {}
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            values = json.loads(line)
        except ValueError:
            # The last words of a killed process.
            continue
        if values["event"] != name:
            continue
        exact = {key: values[key] for key in ("loss", "grad_norm", "lr", "tokens", "eval_loss") if key in values}
        assert found.setdefault(values["step"], exact) == exact, f"step {values['step']} was another after a kill"
    return found


def run_until(monkeypatch, arguments, log, seconds=None, weights=None):
    """Runs the command in a process of its own; kills it so long after its next step. The exit status."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["support.train_command"])
    lines = len(events(log))
    child = server.Process(target=train, args=(arguments, log, weights))
    child.start()
    if seconds is not None:
        while child.is_alive() and len(events(log)) <= lines:
            time.sleep(0.005)
        time.sleep(seconds)
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
    child.join(SECONDS_MAX)
    return child.exitcode


def run_ranks(monkeypatch, count, arguments, log, kill=None):
    """Runs the command on so many ranks, as torchrun starts them; the exit statuses.

    Args:
        monkeypatch: sets what the processes are loaded with.
        count: of ranks.
        arguments: of the command.
        log: of each rank, with its number at the end.
        kill: a rank, and how many seconds after the next step of the run it is killed.
    """
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["support.train_command"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [log.with_name(f"{log.name}-{rank}") for rank in range(count)]
    lines = len(events(logs[0]))
    meeting = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = [
        server.Process(
            target=train, args=(arguments, logs[rank], None, {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        )
        for rank in range(count)
    ]
    for child in children:
        child.start()
    try:
        if kill is not None:
            rank, seconds = kill
            while children[0].is_alive() and len(events(logs[0])) <= lines:
                time.sleep(0.005)
            time.sleep(seconds)
            if children[rank].is_alive():
                os.kill(children[rank].pid, signal.SIGKILL)
        until = time.monotonic() + SECONDS_MAX
        for child in children:
            child.join(max(0.0, until - time.monotonic()))
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
    return [child.exitcode for child in children]
