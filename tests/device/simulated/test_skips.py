"""Tests that a machine without g++ skips these tests, and that CI does not."""

import os
import subprocess
import sys

import pytest
from device.simulated import build
from device.simulated.test_order import LONG


@pytest.mark.posing
@pytest.mark.parametrize("insists", [True, pytest.param(False, marks=LONG)])
def test_without_a_compiler(insists, tmp_path):
    test = "tests/device/simulated/test_order.py::test_exit_without_close[True]"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        env={**os.environ, "PATH": str(tmp_path), "MEMASCEND_REQUIRE_ROOT": "1" if insists else "0"},
        cwd=build.ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == (1 if insists else 0), done.stdout + done.stderr
    assert "g++ is missing" in done.stdout
    assert "1 skipped" in done.stdout
