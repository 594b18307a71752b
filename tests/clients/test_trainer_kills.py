"""Tests that TRL's Trainers and that of sentence-transformers, killed at any moment, end as those in memory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from clients import trained_trainers
from support.trained_program import logged

MOMENTS = ["micro-batch", "before the step", "after the commit", "end of the step", "evaluation", "checkpoint"]


def begun(folder, name, kind, *words):
    line = [sys.executable, trained_trainers.__file__, kind, str(folder / name), str(folder / f"{name}.log")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HOME": str(folder / "hub")}
    return subprocess.Popen(
        [*line, *map(str, words)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(child, ends=0):
    out, words = child.communicate(timeout=200)
    assert child.returncode == ends, words[-3000:]
    return out.splitlines()[-1:]


# A moment and a step of each kind.
KILLS = {
    "packed": ("creation", 0),
    "answers": ("micro-batch", 5),
    "adapters": ("evaluation", 4),
    "preferences": ("after the commit", 7),
    "judgements": ("checkpoint", 5),
    "reward": ("evaluation", 8),
    "sentences": ("before the step", 7),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", trained_trainers.KINDS)
def test_it_ends_as_in_memory(tmp_path, kind):
    want = ended(begun(tmp_path, "memory", kind))
    ended(begun(tmp_path, "killed", kind, *KILLS[kind]), -signal.SIGKILL)
    assert ended(begun(tmp_path, "killed", kind)) == want
    assert logged(tmp_path / "killed.log") == logged(tmp_path / "memory.log")
    assert len(logged(tmp_path / "killed.log")) >= 6


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", trained_trainers.KINDS)
def test_it_ends_as_in_memory_after_twenty_kills(tmp_path, kind):
    dice = random.Random(kind)
    want, log = ended(begun(tmp_path, "memory", kind)), tmp_path / "killed.log"
    began = time.monotonic()
    ended(begun(tmp_path, "other", kind))
    whole = time.monotonic() - began
    for number in range(20):
        if number % 2:
            # At a moment of the clock: while it loads, creates the store, trains, evaluates, or writes.
            child = begun(tmp_path, "killed", kind)
            time.sleep(whole * dice.uniform(0.5, 1.0))
            child.kill()
            child.communicate()
            continue
        done = max((step for step, _ in logged(log)), default=0) if log.exists() else 0
        child = begun(tmp_path, "killed", kind, dice.choice(MOMENTS), done + dice.randrange(3))
        child.communicate(timeout=200)
    assert ended(begun(tmp_path, "killed", kind)) == want
    assert logged(log) == logged(tmp_path / "memory.log")
