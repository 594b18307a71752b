"""Tests the GPU benchmark's counting, without a GPU."""

import pytest

pytest.importorskip("transformers")

from benchmarks import cuda


@pytest.mark.parametrize("parameters", [400_000, 30_000_000, 2_000_000_000])
def test_the_largest_that_fits(parameters):
    vocabulary = 64 if parameters < 10**7 else 32_768
    count = cuda.count_of(cuda.bodiless(cuda.shape(parameters, vocabulary)))
    assert 0.8 * parameters < count <= parameters
    with pytest.raises(SystemExit, match="give more storage"):
        cuda.shape(1000)


def test_the_bound():
    """Whatever takes longest in each part of the step; gradients go out while values come in."""

    class Plan:
        read_bytes = {"values, forward": 2 * 10**9, "values, backward": 2 * 10**9, "state": 10**10}  # noqa: RUF012
        written_bytes = {"values": 2 * 10**9, "state": 10**10}  # noqa: RUF012

    disk = {"read": 4.0, "mixed": 4.0}
    found = cuda.bounds(Plan, {"forward": 1.0, "backward": 2.0}, disk, {})
    assert found == {"compute": 3.0, "disk": 6.5, "step": 7.0}
    found = cuda.bounds(Plan, {"forward": 1.0, "backward": 2.0}, disk, {"in": 1.0, "out": 0.2})
    assert found["PCIe"] == pytest.approx(12.0)
    assert found["step"] == pytest.approx(12.0)


def test_the_longest_context():
    for most in (300, 512, 700, 3000, 4096, 100_000):
        found = cuda.longest(lambda length, most=most: length <= most, 1 << 15)
        assert found <= min(most, 1 << 15)
        assert most < 512 or found > 0.85 * min(most, 1 << 15)
