"""Tests the larger-than-memory demonstration under a limit that the kernel enforces."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_weights_three_times_the_limit(cgroup):
    (ROOT / "target").mkdir(exist_ok=True)
    done = subprocess.run(
        # A temporary folder may be memory.
        [
            sys.executable,
            "-m",
            "benchmarks.larger_than_memory",
            *("--json", "--cgroup", cgroup, "--folder", ROOT / "target", "--limit", "96MiB"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(done.stdout)
    assert [part["part"] for part in found["parts"]] == ["created", "resumed", "continued"]
    for part in found["parts"]:
        assert part["killed for memory"] == 0
        assert 0 < part["anonymous peak"] < found["limit"]
        assert part["peak with files"] <= found["limit"]
    assert found["weights"] >= 3 * found["limit"]
    assert found["state"] >= 20 * found["limit"]
