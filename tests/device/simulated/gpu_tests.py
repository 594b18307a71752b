"""Runs tests of a GPU on the simulated CUDA, in the process that asks for it."""

from __future__ import annotations

import pytest


class Passed:
    """Counts the tests that pass."""

    def __init__(self):
        self.count = 0

    def pytest_runtest_logreport(self, report):
        self.count += report.when == "call" and report.passed


def run(chosen):
    """How many tests of these files and names passed, where none failed."""
    passed = Passed()
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "gpu and not slow"]
    assert pytest.main([*words, *chosen], plugins=[passed]) == pytest.ExitCode.OK
    return passed.count
