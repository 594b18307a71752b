"""Tests that TRL's Trainers and that of sentence-transformers, killed at any moment, end as those in memory."""

from __future__ import annotations

import signal
import sys

import pytest
from clients import trained_trainers
from support.lives import life
from support.trained_program import logged

KILLS = [
    ("creation", 0), ("micro-batch", 1), ("after the commit", 2), ("evaluation", 4), ("checkpoint", 5),
    ("end of the step", 6), ("before the step", 7),
]  # fmt: skip


def run(folder, name, kind, *words, **how):
    """One `life` of the program; its last line is a digest of the weights."""
    store = "memory" if name == "memory" else folder / name
    line = [sys.executable, trained_trainers.__file__, kind, store, folder / f"{name}.log", *words]
    return life(line, PYTHONWARNINGS="ignore", HF_HOME=str(folder / "hub"), **how)


def digest(output):
    return output.splitlines()[-1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", ["one", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", trained_trainers.KINDS)
def test_it_ends_as_in_memory(tmp_path, kind, kills):
    want = digest(run(tmp_path, "memory", kind))
    number = list(trained_trainers.KINDS).index(kind)
    for kill in KILLS if kills == "all" else [KILLS[number]]:
        run(tmp_path, "killed", kind, *kill, ends=-signal.SIGKILL)
    assert digest(run(tmp_path, "killed", kind)) == want
    assert logged(tmp_path / "killed.log") == logged(tmp_path / "memory.log")
    assert len(logged(tmp_path / "killed.log")) >= 6
