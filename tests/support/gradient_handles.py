"""Builds gradient handles over gradients in RAM, and compares what they give with plain gradients."""

from types import SimpleNamespace

import torch
from support.bits import same_bits

from memascend.grads.gradient import Gradient
from memascend.grads.norms import Norms

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class KeptInMemory:
    """The engine and the run of one gradient, which is in RAM as the store holds it on SSD; counts what is read."""

    def __init__(self, tensor):
        self.seen = []
        self.reads = 0
        self.norms = Norms()
        self.engine = self.loop = self
        place = SimpleNamespace(
            parameter=SimpleNamespace(grad=None),
            name="layer.weight",
            shape=tensor.shape,
            stride=tensor.stride(),
            dtype=tensor.dtype,
            device=torch.device("cpu"),
        )
        self.gradient = Gradient(self, place, rule=None, step=0)
        self.gradient.store(tensor.clone())

    # --- what an engine does --------------------------------------------------------

    def spill(self, _, gradient, *, add=False):
        if hasattr(self, "tensor"):
            assert gradient.stride() == self.tensor.stride()
            assert gradient.dtype == self.tensor.dtype
        assert type(gradient) is torch.Tensor
        self.tensor = self.tensor + gradient if add else gradient

    def read_spilled(self, _, into):
        self.reads += 1
        into.copy_(self.tensor)

    def spilled(self, _):
        return not self.tensor.isfinite().all().item(), 0.0

    # --- what the gradients of a run do ---------------------------------------------

    def settle_later(self, _):
        pass

    def add(self, gradient, values, *, summed):
        gradient.change(gradient.laid_out(values), add=not summed)

    def require_in_order(self, _):
        self.seen.append("add")

    def note_change(self):
        pass

    def notice(self, words):
        self.seen.append(words)


def handle_over(kept):
    handle = kept.gradient.handle
    handle.backing = kept
    return handle


def handle_of(tensor):
    return handle_over(KeptInMemory(tensor))


def assert_same(handle, expected):
    """What the step would use: by replay and, where there are any, by factors."""
    got = handle.gradient.materialize()
    assert got.dtype == expected.dtype
    assert got.stride() == expected.stride()
    assert same_bits(got, expected)
    factors = handle.gradient.factors()
    if factors is not None:
        product = handle.gradient._gradients.tensor.clone()
        for factor in factors:
            product = (product.float() * torch.tensor(factor, dtype=torch.float32)).to(product.dtype)
        assert same_bits(product, expected)


def gradient(shape=(3, 5), dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
