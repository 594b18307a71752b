"""Tests the published reservations: what pools reserve for models, by hand and beside each other."""

import pytest

from benchmarks.reservation import POOLS, load_models, reserve, unit_bytes


@pytest.mark.parametrize("model", load_models(), ids=lambda model: model["model"])
def test_shapes_add_up_to_the_published_size(model):
    assert sum(sum(unit) for unit in unit_bytes(model)) // 2 == model["parameters"]


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
