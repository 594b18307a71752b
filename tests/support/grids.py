"""Marks the cases of a parametrized test as slow, except a few cases that run after every change."""

import itertools

import pytest


def usual(cases, *chosen):
    """Returns all cases for `parametrize`; cases that are not in `chosen` are marked slow."""
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def covered(*axes):
    """Returns every combination of one value from each axis.

    A few of the combinations are not marked slow. Together, these few contain each value of each axis.
    """
    axes = [list(axis) for axis in axes]
    rounds = range(max(map(len, axes)))
    chosen = {tuple(index % len(axis) for axis in axes) for index in rounds}
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, places, strict=True)),
            marks=[] if places in chosen else [pytest.mark.slow],
        )
        for places in itertools.product(*(range(len(axis)) for axis in axes))
    ]
