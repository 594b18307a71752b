"""Tests the conclusions of the benchmarks `clipped` and `predicted`: intervals, verdicts, comparisons."""

import json

import pytest

from benchmarks import clipped, predicted


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [(12, 3, 10, 1 - 2 * 79 / 4096), (6, 1, 6, 1 - 2 / 64), (5, 1, 5, 1 - 2 / 32), (1, 1, 1, 0.0)],
)
def test_median_interval_lies_between_order_statistics(count, low, high, confidence):
    """The binomial distribution gives the interval of a median.

    Of 12 values, the interval is from the 3rd to the 10th value. Of six or fewer values, it is from the smallest to the
    largest value.
    """
    assert clipped.median_interval(list(range(count, 0, -1))) == (low, high, confidence)


def test_ratio_interval_excludes_1_only_for_runs_that_differ():
    old = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0]
    ratio, low, high = clipped.ratio_interval([2 * one for one in old], old)
    assert low < ratio == 2.0 < high
    assert low > 1.0
    _, low, high = clipped.ratio_interval(old, old)
    assert low < 1.0 < high


@pytest.mark.parametrize(("seconds", "verdict"), [(1.09, "met"), (1.11, "MISSED")])
@pytest.mark.parametrize("length", [128, 512])
def test_clipped_verdict_compares_paired_rounds_and_needs_long_steps(seconds, verdict, length):
    """In each case, the rounds get slower by the same factors.

    A verdict must therefore compare a round of one case with the same round of the other case.
    """
    settings = {"table": "memory", "parameters": "500M", "batch": 4, "length": length, "threads": 1}
    names = ("torch in memory, clipped", "unclipped", "clipped by max_grad_norm", "clipped by clip_grad_norm_")
    cases = {
        name: _case([one * drift for drift in (1, 2, 3)]) for name, one in zip(names, (1, 1, seconds, 2), strict=True)
    }
    text = clipped._shown(settings, cases)
    line = next(line for line in text.splitlines() if line.startswith(f"{names[2]}, of {names[0]}: "))
    assert f": {seconds:.3f} (" in line
    assert (f"at most 1.1: {verdict};" in line) == (length == 512)


def test_earlier_run_with_other_settings_is_rejected(tmp_path):
    path, settings = tmp_path / "clipped_memory.json", {"table": "memory", "length": 512}
    path.write_text(json.dumps({"settings": settings, "cases": {"unclipped": {"rounds": [1.0]}}}))
    assert clipped._before(path, settings) == {"unclipped": {"rounds": [1.0]}}
    with pytest.raises(SystemExit, match="512"):
        clipped._before(path, {**settings, "length": 128})


def _case(rounds):
    figures = dict.fromkeys(
        ("processor", "read", "written", "peak", "added", "owners_peak", "budget", "early", "anew"), 0
    )
    return {"seconds": rounds[1], "spread": [rounds[0], rounds[-1]], "rounds": rounds, "first": [], **figures}


@pytest.mark.parametrize(("seconds", "verdict"), [(1.09, "met"), (0.91, "met"), (1.11, "MISSED"), (0.89, "MISSED")])
def test_predicted_verdict_uses_the_way_that_the_run_took(seconds, verdict):
    case = {
        "seconds": [seconds, 9.0, 0.1], "way": "next forward", "predicted": {"next forward": 1.0, "early": 2.0},
        "drive": 0.5, "held": 0.35, "parameters": 96e6,
    }  # fmt: skip
    text = predicted._shown({"compute": [1.5, 4.1], "drive": [0.3, 0.24]}, {"one batch, clipped": case})
    assert f"{seconds:.3f} ({verdict})" in text
    assert "early 2.00" in text
