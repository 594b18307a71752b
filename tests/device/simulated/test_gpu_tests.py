"""Tests that the tests of a GPU begin: what needs no numbers passes on the simulated CUDA, warnings are errors."""

import subprocess
import sys

import pytest
from device.simulated import build
from device.simulated.test_order import LONG

pytestmark = [pytest.mark.posing, *LONG, pytest.mark.timeout(300)]
# They look at memory, registration, waits, launches and copies alone; others compare what kernels compute.
WITHOUT_NUMBERS = {
    "device/test_cuda.py": [
        "test_the_chunks_are_registered",
        "test_the_host_waits_for_no_computation_in_a_forward",
        "test_a_device_that_is_not_there",
    ],
    "device/staging/test_arena.py": ["test_a_slot_comes_back_to_whoever_waits"],
    "device/staging/test_staging.py": ["test_a_unit_arrives_whole"],
    "device/staging/test_windows.py": ["test_gradients_are_lent_in_windows"],
    "device/test_device.py": [
        "test_it_says_that_it_is_there",
        "test_no_memory_for_the_units",
        "test_host_memory_does_not_depend_on_the_model",
    ],
    "kernels/test_kernels_gpu.py": ["test_the_device_has_the_kernels", "test_nothing_waits_for_the_device"],
    "memory/test_memory_cuda.py": ["test_a_real_device_copies_from_a_region"],
}


def test_they_begin(simulated):  # noqa: ARG001 - it is built
    files = [f"tests/{path}::{name}" for path, names in WITHOUT_NUMBERS.items() for name in names]
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
    assert "12 passed" in done.stdout, done.stdout


def test_the_benchmark_of_kernels_ends(simulated):  # noqa: ARG001 - it is built
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels_gpu", "--mebibytes", "1"],
        env=build.environment(), cwd=build.ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # Three dtypes beside three peers each, one of which torch does not have for bf16.
    assert done.stdout.count("check ") == 8
