"""Tests kill -9 at random moments of training: the joined losses are those of an undisturbed run."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from pathlib import Path

import pytest
from parity.killed import said, train

TESTS = Path(__file__).resolve().parent.parent

# For one life of the training, also on a machine that does ten other things.
SECONDS_MAX = 280


def run_until(server, arguments, log, seconds=None):
    """Runs the training in a process of its own; kills it so long after it began to train."""
    lines = len(said(log))
    child = server.Process(target=train, args=arguments)
    child.start()
    if seconds is not None:
        while child.is_alive() and len(said(log)) <= lines:
            time.sleep(0.002)
        time.sleep(seconds)
        child.kill()
    child.join(SECONDS_MAX)
    return child.exitcode


@pytest.mark.parametrize(
    ("gradients", "kills", "state", "together"),
    [
        pytest.param("fused", 3, None, 1, marks=pytest.mark.timeout(300)),
        *(
            pytest.param(mode, 20, state, together, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])
            for mode, state, together in (
                ("fused", None, 1),
                ("ssd", None, 1),
                ("fused", "bf16", 1),
                ("ssd", "8bit", 1),
                ("fused", None, 4),
                ("ssd", "8bit", 3),
            )
        ),
    ],
)
def test_kills_change_nothing(tmp_path, monkeypatch, gradients, kills, state, together):
    # Children are forked from a process that has imported torch and run nothing: each begins within milliseconds.
    # What that process cannot find it leaves out without a word, and Python before 3.13 does not hand on where to look.
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["parity.killed"])
    steps = 12 * kills  # more than run between two kills
    calm, log = tmp_path / "calm.log", tmp_path / "killed.log"
    assert run_until(server, (tmp_path / "calm.store", calm, gradients, steps, state, together), calm) == 0
    expected = said(calm)
    assert sorted(expected) == list(range(steps))
    generator = random.Random(kills)
    killed = 0
    for _ in range(kills):
        arguments = (tmp_path / "killed.store", log, gradients, steps, state, together)
        killed += run_until(server, arguments, log, generator.uniform(0, 0.1)) == -signal.SIGKILL
    assert killed >= kills // 2, "it was too quick to be killed"
    assert run_until(server, (tmp_path / "killed.store", log, gradients, steps, state, together), log) == 0
    assert said(log) == expected
