"""Tests how the training benchmark runs a peer in a process of its own: what it gets, answers and loads."""

import stat
import subprocess
import sys

from benchmarks.train.cell.workload import WORKLOADS
from benchmarks.train.launch import Launcher

WORK = WORKLOADS["4M-1x128"]


def test_a_peer_gets_its_environment_and_answers(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        "#!/bin/sh\n"
        'test -f "$PYTHONPATH/benchmarks/train/cell/__main__.py" && test "$DS_ACCELERATOR" = cpu || exit 1\n'
        'echo "noise"; echo \'cell: {"value": 1}\'; echo "more noise"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
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
