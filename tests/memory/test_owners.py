"""Tests that a report's owners add up to what the process grew by."""

import pytest

MIB = 1 << 20
# What has no owner: what torch keeps of the first step of a size, and Python's objects for each parameter (4.5 MiB were
# seen for 459 parameters, and at most 0.8 MiB elsewhere).
BESIDE_BYTES = MIB
OBJECT_BYTES = 10 << 10

CASES = {
    "deep and narrow": {"blocks": 24, "width": 128, "vocabulary": 64},
    "large buffers": {"buffer_bytes": 24 * MIB},
    "resumed": {"resume": True},
    "ssd": {"options": {"gradients": "ssd"}},
    "ram": {"options": {"gradients": "ram"}},
    "activations": {"tokens": 512, "options": {"gradients": "fused", "activations": "ssd"}},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_the_report_is_what_the_process_grew_by(measure, case):
    run = measure(**{"vocabulary": 1024, **CASES[case]})
    total = run["report"]["host"]["total"]
    # The model's own values left the process.
    grown = run["trained"]["RssAnon"] - run["made"]["RssAnon"] + run["model_bytes"]
    bound = BESIDE_BYTES + run["parameters"] * OBJECT_BYTES
    assert abs(grown - total) <= bound, (grown, total, run["report"]["host"]["owners"])
