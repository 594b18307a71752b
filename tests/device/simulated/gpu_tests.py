"""Runs GPU tests on the simulated CUDA, in the calling process."""

from __future__ import annotations

import pytest


class Passed:
    """A pytest plugin that counts the tests that pass."""

    def __init__(self):
        self.count = 0

    def pytest_runtest_logreport(self, report):
        self.count += report.when == "call" and report.passed


def run(chosen):
    """Runs the GPU tests that `chosen` lists; requires that no test fails; returns the number of tests that passed."""
    passed = Passed()
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "gpu and not slow"]
    assert pytest.main([*words, *chosen], plugins=[passed]) == pytest.ExitCode.OK
    return passed.count
