"""Tests that the tests of a GPU begin: what needs no numbers passes on the simulated CUDA, warnings are errors."""

import subprocess
import sys

import pytest
from device.simulated import build
from device.simulated.test_order import LONG

pytestmark = [pytest.mark.posing, *LONG, pytest.mark.timeout(300)]
# They look at memory, registration and waits alone.
WITHOUT_NUMBERS = [
    "test_the_chunks_are_registered",
    "test_nothing_waits_for_the_whole_device",
    "test_the_host_waits_for_no_computation_in_a_forward",
]


def test_they_begin(simulated):  # noqa: ARG001 - it is built
    files = [f"tests/device/test_cuda.py::{name}" for name in WITHOUT_NUMBERS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files],
        env={**build.environment(), "MEMASCEND_GPU": "1", "MEMASCEND_POSING": "0"},
        cwd=build.ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout, done.stdout
