"""Chooses which cases of a grid run after every change; the others are slow."""

import itertools

import pytest


def usual(cases, *chosen):
    """All cases, as parametrize takes them; those that are not chosen are slow."""
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def covered(*axes):
    """Every combination; all but so many are slow that each value of each axis is there."""
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
