"""Tests how the training benchmark runs a peer in a process of its own: what it gets, answers, and ends by."""

import stat
import subprocess
import sys

import pytest

from benchmarks.train.cell.workload import WORKLOADS
from benchmarks.train.launch import Launcher

WORK = WORKLOADS["4M-1x128"]


@pytest.fixture
def peer(tmp_path):
    """An interpreter, as far as the one who starts it can see, that does as the script says."""

    def made(script):
        path = tmp_path / "bin" / "python"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return made


def test_a_peer_that_cannot_run_is_shown_with_its_error(peer, tmp_path):
    python = peer("echo 'RuntimeError: More elements than buffer size'; echo 'bye'; exit 1")
    answer = Launcher(tmp_path, python).run(WORK, "zero-infinity", steps=1)
    assert answer["error"] == "RuntimeError: More elements than buffer size"
    assert Launcher(tmp_path, None).run(WORK, "zero-infinity", steps=1)["missing"]
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_a_peer_gets_its_environment_and_answers(peer, tmp_path):
    python = peer(
        'test -f "$PYTHONPATH/benchmarks/train/cell/__main__.py" && test "$DS_ACCELERATOR" = cpu || exit 1\n'
        'echo "noise"; echo \'cell: {"value": 1}\'; echo "more noise"'
    )
    assert Launcher(tmp_path, python).run(WORK, "zero-offload", steps=1) == {"value": 1}


def test_what_runs_beside_a_peer_loads_nothing_else_of_ours():
    program = (
        "import sys, benchmarks.train.cell.__main__, benchmarks.train.cell.systems.zero\n"
        "import benchmarks.peers.nvme_update\n"
        "print(*(name for name in sys.modules if name.startswith('memascend')), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    *names, torch = done.stdout.split()
    assert torch == "False"
    allowed = {"memascend", *(f"memascend.{name}" for name in ("errors", "text", "cli", "cli.process"))}
    assert set(names) <= allowed
