"""Tests that a report's owners add up to what the process grew by."""

import pytest
from support.grids import usual

MIB = 1 << 20
# What has no owner: what torch keeps of the first step of a size.
BESIDE_BYTES = 2 * MIB
# What is freed after a step gave back what was free: the heap keeps so much at its end (M_TRIM_THRESHOLD).
HEAP_BYTES = 2 * MIB
# Where a weight lay in the C library's heap, a page stays at the end of its hole.
PAGE_BYTES = 4096

CASES = {
    "deep and narrow": {"blocks": 48, "width": 128, "vocabulary": 64},
    "large buffers": {"buffer_bytes": 24 * MIB},
    "resumed": {"resume": True},
    "ssd": {"options": {"gradients": "ssd"}},
    "ram": {"options": {"gradients": "ram"}},
    "activations": {"tokens": 512, "options": {"gradients": "fused", "activations": "ssd"}},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", usual(CASES, "deep and narrow", "activations"))
def test_the_report_is_what_the_process_grew_by(measure, case):
    run = measure(**{"vocabulary": 1024, **CASES[case]})
    owners, total = run["report"]["host"]["owners"], run["report"]["host"]["total"]
    objects = run["report"]["beside"]["Python objects"]
    # The model's own values left the process.
    grown = run["trained"]["RssAnon"] - run["made"]["RssAnon"] + run["model_bytes"]
    beside = BESIDE_BYTES + HEAP_BYTES + run["parameters"] * PAGE_BYTES
    # A run that is opened again has its objects where those of the first one were.
    assert total - BESIDE_BYTES <= grown <= total + objects + beside, (grown, total, objects, owners)
    if case == "deep and narrow":
        assert grown >= total + objects / 2, (grown, total, objects, owners)
