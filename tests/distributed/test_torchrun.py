"""Tests examples/fsdp.py as a user starts it: by torchrun, killed, restarted, and on meshes of replicas."""

import os
import signal
import sys
from pathlib import Path

import pytest
from support.bits import files
from support.lives import Running, life
from support.torchrun import command

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/fsdp.py"

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_lost_a_rank_is_restarted_and_ends_as_that_of_one_rank(tmp_path, count):
    """4 ranks are two replicas. Torch's own group needs a store of its own in each attempt."""
    example = (EXAMPLE, "--steps", "6", "--storage")
    # As torchrun starts one rank, which needs no port of its own.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    life([sys.executable, *example, tmp_path / "one"], **alone)
    ranks = (*example, tmp_path / "ranks", "--replicas", count // 2)
    start = command(*ranks, count=count, options=("--max-restarts", "1"))
    running = Running(start, tmp_path / "output", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    running.wait_for(f"rank {count - 1}, step 2")
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    status, output = running.ended()
    assert status == 0, output
    # It resumed once, and no step of all is done again but the one in which the rank died.
    assert output.count("rank 0, step 0:") == 1
    assert files(tmp_path / "ranks-saved") == files(tmp_path / "one-saved")
