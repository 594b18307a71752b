"""Tests the comparison of predicted with measured steps."""

import pytest

from benchmarks import predicted


@pytest.mark.parametrize(("seconds", "verdict"), [(1.09, "met"), (0.91, "met"), (1.11, "MISSED"), (0.89, "MISSED")])
def test_a_verdict_is_of_the_way_that_the_run_took(seconds, verdict):
    case = {
        "seconds": [seconds, 9.0, 0.1], "way": "next forward", "predicted": {"next forward": 1.0, "early": 2.0},
        "drive": 0.5, "held": 0.35, "parameters": 96e6,
    }  # fmt: skip
    text = predicted._shown({"compute": [1.5, 4.1], "drive": [0.3, 0.24]}, {"one batch, clipped": case})
    assert f"{seconds:.3f} ({verdict})" in text
    assert "early 2.00" in text
