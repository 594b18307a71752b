"""Runs functions in processes with simulated CUDA. In CI, tests/conftest.py fails a run that skips these tests."""

import json

import pytest
from device.simulated import build
from support.loaded import Loaded


@pytest.fixture(scope="session")
def _on_it():
    try:
        environment = build.environment()
    except build.Unavailable as why:
        pytest.skip(f"no simulated CUDA: {why}")
    loaded = Loaded(environment, ["device.simulated.loads"])
    yield loaded, environment
    loaded.close()


@pytest.fixture
def simulated(_on_it, tmp_path):
    """Returns a function that calls "MODULE.FUNCTION" of `device.simulated` in a forked process.

    The returned function returns the result of this call, or the process's output if the call did not return.
    """
    loaded, environment = _on_it

    def call(function, *, env=None, status=0, timeout=100, whole=False, **arguments):
        module, name = function.split(".")
        program = (
            "import json, sys\n"
            f"from device.simulated import {module}\n"
            f"found = {module}.{name}(**json.loads(sys.argv[1]))\n"
            "print('found: ' + json.dumps(found))\n"
        )
        env = {**environment, "TMPDIR": str(tmp_path), **(env or {})}
        done = loaded.run(program, json.dumps(arguments), env=env, timeout=timeout, whole=whole)
        assert done.status == status, f"status {done.status}\n{done.out}\n{done.err}"
        lines = [line for line in done.out.splitlines() if line.startswith("found: ")]
        return json.loads(lines[-1].removeprefix("found: ")) if lines else done.out + done.err

    return call
