"""A pytest plugin that runs tests without an outcome yet and logs each beginning and end."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from device.slices import read

# What a context that is lost says: no test after it in its process could pass.
LOST = ("CUDA error", "illegal memory access", "device-side assert")
# What else tests import: a machine as it is may not have it.
OTHERS = {"accelerate", "hypothesis", "matplotlib", "numpy", "peft", "transformers"}


def skipping():
    try:
        return (yield)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in OTHERS and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed here")
        raise


class Told:
    """What is done, and what is begun."""

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

    # Once the marks have chosen.
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
        said = "" if worst.passed else str(worst.longrepr)
        if worst.skipped and isinstance(worst.longrepr, tuple):
            said = worst.longrepr[2]
        self.write(
            end=report.nodeid, outcome=worst.outcome, seconds=sum(one.duration for one in reports), said=said[-2000:]
        )

        if any(one.failed and any(of in str(one.longrepr) for of in LOST) for one in reports):
            self.session.shouldstop = "the context is lost: the others get a new process"

    def pytest_sessionfinish(self, session, exitstatus):
        if not session.shouldstop and exitstatus in (0, 1, 5):
            self.write(finished=True)


def pytest_configure(config):
    path = os.environ.get("MEMASCEND_TOLD")
    if path:
        config.pluginmanager.register(Told(Path(path)), "told")
