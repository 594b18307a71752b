"""Makes tensors of random numbers, compares tensors and state dicts bit for bit, and reads checkpoints."""

import torch


def randoms(numel, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def as_bytes(tensor):
    """Returns the bytes of a tensor's elements, in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(one, other, *, any_nan=False):
    """True if dtype, shape and bits are equal. With `any_nan`, two NaNs count as equal even if their bits differ."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if any_nan and one.is_floating_point():
        nan = one.isnan()
        if not torch.equal(nan, other.isnan()):
            return False
        one, other = one.masked_fill(nan, 0), other.masked_fill(nan, 0)
    return torch.equal(as_bytes(one), as_bytes(other))


def same_states(one, other):
    """True if two dicts of tensors have the same names, and the tensors of each name are equal bit for bit."""
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)


def files(folder):
    """Returns the bytes of each file of a checkpoint except the manifest.

    The manifest contains the store's id, so it differs between stores.
    """
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
