"""Builds gradient handles over gradients in RAM, and compares what they give with plain gradients."""

import torch
from support.bits import same_bits

from memascend.grads.lazy_grad import DeferredGradient, GradientHandle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class KeptInMemory:
    """A keeper that holds the gradient in RAM, as the store holds it on SSD; it counts what is out at a time."""

    name, fused = "layer.weight", False

    def __init__(self, tensor):
        self.tensor = tensor.clone()
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.seen = []
        self.reads = 0

    def read(self):
        self.reads += 1
        return self.tensor.clone()

    def add(self, gradient, **_):
        assert gradient.stride() == self.tensor.stride()
        assert gradient.dtype == self.dtype
        self.tensor = self.tensor + gradient

    def assign(self, gradient):
        assert gradient.stride() == self.tensor.stride()
        assert gradient.dtype == self.dtype
        assert type(gradient) is torch.Tensor
        self.tensor = gradient

    def nonfinite(self):
        return not self.tensor.isfinite().all().item()

    def norm_by(self, _):
        return None

    def noticed(self, what):
        self.seen.append(what)


def handle_over(backing, strides=None):
    """A handle on the CPU, row-major unless other strides are given."""
    strides = torch.empty(backing.shape, device="meta").stride() if strides is None else strides
    return GradientHandle(DeferredGradient(backing, strides, torch.device("cpu")))


def handle_of(tensor):
    return handle_over(KeptInMemory(tensor), tensor.stride())


def assert_same(handle, expected):
    """What the step would use: by replay and, where there are any, by factors."""
    got = handle.gradient.materialize()
    assert got.dtype == expected.dtype
    assert got.stride() == expected.stride()
    assert same_bits(got, expected)
    factors = handle.gradient.factors()
    if factors is not None:
        product = handle.backing.tensor.clone()
        for factor in factors:
            product = (product.float() * torch.tensor(factor, dtype=torch.float32)).to(product.dtype)
        assert same_bits(product, expected)


def gradient(shape=(3, 5), dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
