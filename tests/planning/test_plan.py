"""Tests the arithmetic of plans against brute force, and the published reservations."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memascend
from memascend.cli import main
from memascend.cli.bench.reservation import POOLS, load_models, reserve, unit_bytes
from memascend.planning.slot_classes import arena_classes

windows = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=6)


def cost(classes):
    return sum(size * count for size, count in classes.items())


def admits(classes, window):
    """Whether the arena's rule, smallest class that holds it, grants every lease of the window."""
    left = dict(classes)
    for size in window:
        fitting = [bound for bound in left if bound >= size]
        if not fitting or left[min(fitting)] == 0:
            return False
        left[min(fitting)] -= 1
    return True


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
        with pytest.raises(memascend.ConfigError, match="at least one byte"):
            arena_classes([[size, 5]])
    assert arena_classes([]) == {}


# Published sizes: the sum of all tensors, in billions of parameters.
PUBLISHED = {
    "Qwen2.5 0.5B": 0.494,
    "Qwen2.5 7B": 7.616,
    "Llama 3.1 8B": 8.030,
    "Flan-T5 XXL": 11.135,
    "Qwen2.5 14B": 14.770,
    "Qwen2.5 32B": 32.764,
    "Mixtral 8x7B": 46.703,
    "Llama 3.1 70B": 70.554,
}


@pytest.mark.parametrize("model", load_models(), ids=lambda model: model["model"])
def test_shapes_add_up_to_the_published_size(model):
    total = sum(sum(unit) for unit in unit_bytes(model)) // 2
    assert total == model["parameters"]
    assert round(total / 1e9, 3) == PUBLISHED[model["model"]]


def test_a_reservation_by_hand():
    embedding, block, head = (1_000_000,), (300_000, 50_000), (1_000_000,)
    result = reserve([embedding, block, block, block, head], window=2)
    # Windows: embedding + block (1,350,000), block + block, block + head. 50,000 bytes are under the threshold of
    # 100,000 elements, so ZeRO-Infinity keeps all three of them and swaps at most two tensors at once.
    assert result.needed == 1_350_000
    assert result.reserved["one size"] == 2 * 1_000_000 + 3 * 50_000
    assert result.reserved["one size, rounded"] == 2**21 + 3 * 50_000
    assert result.reserved["per shape"] == 1_000_000 + 2 * 350_000
    # One slot that the embedding and the head share, two for blocks, in whole pages.
    assert 1_700_000 <= result.reserved["arena"] <= 1_700_000 * 1.01 + 4096
    assert result.waste("one size") == pytest.approx(100 * (2_150_000 / 1_350_000 - 1))


@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("model", load_models(), ids=lambda model: model["model"])
def test_the_arena_reserves_no_more_than_any_other_pool(model, window):
    result = reserve(unit_bytes(model), window)
    assert all(result.reserved[pool] >= result.needed for pool in POOLS)
    # At most the two percent that alignment may cost, and far less in fact.
    assert result.reserved["arena"] <= 1.001 * min(result.reserved.values())


def test_bench_memory_prints_and_draws(capsys, tmp_path):
    picture = tmp_path / "deep" / "memory.png"
    assert main(["bench", "memory", "--json", "--picture", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["reserved"]) == set(PUBLISHED)
    assert picture.read_bytes()[:4] == b"\x89PNG"
