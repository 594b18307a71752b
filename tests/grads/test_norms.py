"""Tests norms of single gradients and of all gradients together: they are exact in any order and on any device."""

import math
from types import SimpleNamespace

import pytest
import torch

from memascend import kernels
from memascend.grads import norms as of_norms
from memascend.grads.norms import Norms, norm_of, of_all_ranks, summands
from memascend.tensors import rounded, total

WIDTH = 24


def measured(gradient):
    norms = Norms()
    (found,) = norms.read([norms.measure(gradient)])
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (1, 0, 2, 3)])
def test_a_gradient_is_measured_in_any_order_and_dtype(dtype, order):
    gradient = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(1)).to(dtype).permute(order)
    bad, squared = measured(gradient)
    assert not bad
    assert rounded(squared) == pytest.approx(float(gradient.abs().double().square().sum()), rel=1e-6)
    gradient[(0,) * 4] = math.nan
    assert measured(gradient)[0]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch warns about its own code
def test_a_sparse_gradient_is_measured():
    gradient = torch.sparse_coo_tensor([[1, 3, 1]], torch.tensor([3.0, 4.0, 1.0]), (5,), check_invariants=True)
    bad, squared = measured(gradient)
    assert not bad
    assert rounded(squared) == 32.0


def test_norm_is_exact_for_any_element_order_and_split():
    """Most squares are so small that a sum of floats would lose them beside the largest square."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-40, 3, (5000,), generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        values = (torch.randn(5000, generator=generator) * 2.0**exponents).to(dtype)
        wanted = math.fsum(values.double().square().tolist())
        for piece in (5000, 1, 333, 512):
            parts = [kernels.checked(part)[1] for part in values[torch.randperm(5000)].split(piece)]
            assert rounded(total(parts)) == wanted
        assert float(kernels.check_and_unscale(list(values.clone().split(700)))[1]) == wanted


def test_of_all_ranks_adds_exact_sums_without_rounding_on_each_rank():
    """Each of the 1,001 ranks adds its exact sum. If each rank rounded its own sum, the norm would differ."""
    values = torch.randn(999, generator=torch.Generator().manual_seed(5))
    own = kernels.checked(values)
    wanted = math.fsum(values.double().square().tolist() * 1001)
    assert norm(of_all_ranks(own, [1001 * one for one in summands(own)], None)) == (True, math.sqrt(wanted))


def test_of_all_ranks_adds_rounded_sums_in_rank_order():
    squares = [3.0, 1 << 298, 1e-17, 1e-17]
    sums = [sum(each) for each in zip(*(summands((False, one)) for one in squares), strict=True)]
    exchange = SimpleNamespace(all_gather=lambda *_: squares)
    assert of_all_ranks((False, 3.0), sums, exchange) == (False, 4.0)


def test_rows_that_another_rank_has_counted_add_nothing():
    norms, (present,) = Norms(counts=False), gradients([3])
    norms.measure_once(*present)
    assert norms.of([present]) == (False, 0)


def norm(numbers):
    """Returns whether all elements are finite, and the norm."""
    return not numbers[0], norm_of(numbers[1])


class Counted:
    """Lets the CPU kernels stand in for a device's kernels; `launches` has the number of tensors of each launch."""

    def __init__(self):
        self.launches = []

    def begin_check(self, tensors, sums):
        self.launches.append(len(tensors))
        kernels.begin_check(tensors, sums)

    def __getattr__(self, name):
        return getattr(kernels, name)


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(of_norms, "_is_counted", lambda values: values.dtype in of_norms._FLOATS)
    found = Counted()
    monkeypatch.setattr(of_norms, "kernels", found)
    return found


def gradients(sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return [
        (SimpleNamespace(name=str(index)), torch.randn(size, generator=generator).to(dtype))
        for index, size in enumerate(sizes)
    ]


def exact(present):
    return math.sqrt(math.fsum(x for _, values in present for x in values.double().square().tolist()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_in_a_devices_memory_are_measured_by_one_launch(counted, dtype, monkeypatch):
    norms, present = Norms(), gradients([1, 0, 333, 5000, 17], dtype)
    for gradient, values in present:
        norms.measure_once(gradient, values)
        norms.measure_once(gradient, torch.zeros(1))
    assert counted.launches == []
    assert norm(norms.of(present)) == (True, exact(present))
    assert counted.launches == [5]
    # `_BUCKET_BYTES` limits the memory of gradients that wait for a launch. With this limit, the same gradients need
    # three launches.
    monkeypatch.setattr(of_norms, "_BUCKET_BYTES", 600)
    norms.begin_step()
    for each in present:
        norms.measure_once(*each)
    assert norm(norms.of(present)) == (True, exact(present))
    assert counted.launches == [5, 3, 1, 1]
    present[2][1][7] = math.nan
    norms.begin_step()
    norms.measure_once(*present[2])
    assert norms.of(present[2:3])[0]


def test_a_gradient_that_arrives_on_a_device_is_measured_at_once(counted):
    """Each gradient has its own launch. The measures of 150 gradients are in only three blocks of memory."""
    norms, present = Norms(), gradients([3] * 150)
    arrived = [norms.measure(values) for _, values in present]
    assert counted.launches == [1] * 150
    blocks = {measure.untyped_storage().data_ptr() for measure in arrived}
    assert len(blocks) == 3
    for _, values in present:
        values.zero_()
    for (gradient, _), measure in zip(present, arrived, strict=True):
        gradient.measure = lambda measure=measure: measure
    assert norm(norms.of(present)) == (True, exact(gradients([3] * 150)))
