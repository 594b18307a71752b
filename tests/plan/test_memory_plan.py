"""Tests the arithmetic of plans against brute force."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.test_memory_plan_budget import admits

import memascend
from memascend.plan.memory_plan import arena_classes

windows = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=6)


def cost(classes):
    return sum(size * count for size, count in classes.items())


@given(windows)
def test_classes_admit_every_window(windows):
    classes = arena_classes(windows)
    assert all(admits(classes, window) for window in windows)


@settings(max_examples=60)
@given(windows)
def test_no_cheaper_classes_exist(windows):
    sizes = sorted({size for window in windows for size in window})
    best = math.inf
    for bounds in itertools.chain.from_iterable(itertools.combinations(sizes, n) for n in range(1, len(sizes) + 1)):
        if bounds[-1] != sizes[-1]:
            continue
        fits = {size: min(bound for bound in bounds if bound >= size) for size in sizes}
        counts = {bound: max(sum(fits[size] == bound for size in window) for window in windows) for bound in bounds}
        best = min(best, cost(counts))
    assert cost(arena_classes(windows)) == best


def test_many_sizes_are_no_burden_and_wrong_ones_are_refused():
    classes = arena_classes([[size] for size in range(1, 401)])
    assert classes == {400: 1}
    for size in (0, -1):
        with pytest.raises(memascend.ConfigError, match="at least 1 byte"):
            arena_classes([[size, 5]])
    assert arena_classes([]) == {}
