"""Tests examples/fsdp.py as a user starts it: by torchrun, killed, resumed, and on meshes of replicas."""

import os
import signal
from pathlib import Path

import pytest
from support.bits import files
from support.torchrun import finished, start, torchrun

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/fsdp.py"

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def kill(folder, count, *more):
    """Kill the last rank once it has committed the third step."""
    running = start(
        ("--standalone", "--nproc-per-node", str(count)), (EXAMPLE, "--storage", folder, "--steps", "500", *more), {}
    )
    last = f"rank {count - 1}, step 2"
    for line in running.stdout:
        if last in line:
            break
    ranks = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    finished(running, 1)


@pytest.mark.parametrize("count", [2, 4])
def test_a_killed_run_ends_as_that_of_one_rank(tmp_path, count):
    """4 ranks are two replicas."""
    steps = ("--steps", "12")
    torchrun(EXAMPLE, "--storage", tmp_path / "one", *steps, count=1)
    more = ("--replicas", str(count // 2))
    kill(tmp_path / "ranks", count, *more)
    told = torchrun(EXAMPLE, "--storage", tmp_path / "ranks", *steps, *more, count=count)
    assert "rank 0, step 0" not in told
    assert files(tmp_path / "ranks-saved") == files(tmp_path / "one-saved")
