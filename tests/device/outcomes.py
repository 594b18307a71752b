"""A pytest plugin that runs only tests without a logged outcome, and logs the beginning and end of each test."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from device.slices import read

# Texts in errors after which the CUDA context may be lost. Then no later test in the same process could pass.
LOST = ("CUDA error", "illegal memory access", "device-side assert")
# Packages that tests import, and that may be missing on a GPU machine. A test whose package is missing is skipped.
OTHERS = {"accelerate", "hypothesis", "matplotlib", "numpy", "peft", "transformers"}


def skipping():
    """Skips a test that fails because one of the packages in `OTHERS` is not installed."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in OTHERS and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed here")
        raise


class Outcomes:
    """The plugin. `done` has the logged outcomes. `begun` counts the starts of each test that has no outcome."""

    def __init__(self, path):
        self.path = path
        self.done, self.begun = read(path)
        self.parts = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self):
        return (yield from skipping())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self):
        return (yield from skipping())

    def pytest_sessionstart(self, session):
        self.session = session

    def write(self, **line):
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    # `trylast` makes this hook run after pytest has deselected tests by their marks.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        self.write(all=[item.nodeid for item in items])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.done])
        items[:] = [item for item in items if item.nodeid not in self.done]
        items.sort(key=lambda item: -self.begun[item.nodeid])

    def pytest_runtest_logstart(self, nodeid):
        self.write(begin=nodeid)
        self.parts = {}

    def pytest_runtest_logreport(self, report):
        self.parts[report.when] = report
        if report.when != "teardown":
            return
        reports = self.parts.values()
        worst = next((one for one in reports if one.failed), next((one for one in reports if one.skipped), report))
        output = "" if worst.passed else str(worst.longrepr)
        if worst.skipped and isinstance(worst.longrepr, tuple):
            output = worst.longrepr[2]
        self.write(
            end=report.nodeid,
            outcome=worst.outcome,
            seconds=sum(one.duration for one in reports),
            output=output[-2000:],
        )

        if any(one.failed and any(of in str(one.longrepr) for of in LOST) for one in reports):
            self.session.shouldstop = "the CUDA context is lost: the other tests need a new process"

    def pytest_sessionfinish(self, session, exitstatus):
        if not session.shouldstop and exitstatus in (0, 1, 5):
            self.write(finished=True)


def pytest_configure(config):
    path = os.environ.get("MEMASCEND_OUTCOMES")
    if path:
        config.pluginmanager.register(Outcomes(Path(path)), "outcomes")
