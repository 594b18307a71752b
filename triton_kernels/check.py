"""Checks gradients for overflow, sums their squares and unscales them in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend import _core
from memascend.errors import ConfigError
from memascend.tensors import flat, rounded

from .arguments import FLOATS, factor_of, require, require_apart, threads_of
from .routes import route
from .sums import add_reference, new_sums

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memascend.tensors import Squares


# Elements that `check_and_unscale_reference` converts to float64 at a time: at most 32 MiB of temporaries.
PIECE_ELEMENTS = 1 << 22
# Bytes that one thread checks within a millisecond or two; `checked` uses one thread for smaller tensors.
_ALONE_BYTES = 16 << 20


def check_and_unscale(
    grads: torch.Tensor | Iterable[torch.Tensor], inv_scale: float = 1.0, *, threads: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiplies gradients by `inv_scale` in place, finds non-finite elements and sums the squares, in one pass.

    Each element is read as fp32, multiplied once, and rounded to its own dtype; nothing is written if `inv_scale` is 1.
    Both results describe the products. The sum of squares is exact and rounded once, at the end, so order, number of
    threads, division into tensors and device do not change a bit. The exception is a device without a kernel: there,
    each addition rounds.

    On CUDA the call only queues work: one launch for each dtype in the list and one for the rounding. It does not
    synchronise; reading a result does.

    Args:
        grads: a tensor or several, on one device, fp32, bf16 or fp16, contiguous. Sizes may be zero.
        inv_scale: the factor, finite in fp32.
        threads: CPU only; None means `torch.get_num_threads()`.

    Returns:
        `found_nonfinite` (bool) and `squared_norm` (float64), both 0-dim and on the device of the gradients. The
        norm is inf or NaN if an element is not finite.

    Raises:
        ConfigError: a tensor has another dtype or device or is not contiguous, or, if `inv_scale` is not 1, two
            tensors overlap. Nothing has been changed.
    """
    tensors = [grads] if isinstance(grads, torch.Tensor) else list(grads)
    factor = factor_of("inv_scale", inv_scale)
    count = threads_of(threads)
    names = ["grads"] if isinstance(grads, torch.Tensor) else [f"grads[{i}]" for i in range(len(tensors))]
    for name, tensor in zip(names, tensors, strict=True):
        require(name, tensor)
        if tensor.device != tensors[0].device:
            raise ConfigError(f"{name} is on {tensor.device} and {names[0]} on {tensors[0].device}: use one device")
    if factor != 1.0:
        require_apart(zip(names, tensors, strict=True))
    device = tensors[0].device if tensors else torch.device("cpu")
    filled = [tensor for tensor in tensors if tensor.numel()]
    taken = route(device).name
    if taken == "rust":
        result = _check_rust(filled, factor, count)
    elif taken == "triton":
        from memascend.kernels.check_jit import begin, fold

        sums = new_sums(1, device)
        begin([(0, tensor) for tensor in filled], factor, sums)
        result = fold(sums)
    else:
        return check_and_unscale_reference(filled, factor, device)
    if factor != 1.0:
        torch.autograd.graph.increment_version(filled)
    return result


def checked(values: torch.Tensor) -> tuple[bool, Squares]:
    """Returns whether an element of a tensor in host memory is not finite, and the exact sum of squares."""
    require("values", values)
    place = values.data_ptr(), FLOATS.index(values.dtype), values.numel()
    # torch's threads spin after an operation. They would delay our threads for longer than one thread needs for a small
    # tensor.
    threads = torch.get_num_threads() if values.nbytes > _ALONE_BYTES else 1
    return _core.kernel_check([place] if values.numel() else [], 1.0, threads)


def begin_check(tensors: Sequence[torch.Tensor], sums: torch.Tensor) -> None:
    """Queues the check of tensors on a device; does not wait for it.

    Args:
        tensors: as for `check_and_unscale`; the current stream reads them.
        sums: from `new_sums`, with a row for each tensor. The kernel adds to the rows, and `found_in` reads them.
    """
    for index, tensor in enumerate(tensors):
        require(f"tensors[{index}]", tensor)
    placed = [(row, tensor) for row, tensor in enumerate(tensors) if tensor.numel()]
    if route(sums.device).name == "triton":
        from memascend.kernels.check_jit import begin

        begin(placed, 1.0, sums)
    else:
        add_reference(placed, sums)


def _check_rust(tensors: Sequence[torch.Tensor], factor: float, threads: int) -> tuple[torch.Tensor, torch.Tensor]:
    places = [(t.data_ptr(), FLOATS.index(t.dtype), t.numel()) for t in tensors]
    found, squares = _core.kernel_check(places, factor, threads)
    # `device` is explicit, because torch's default device may not be the CPU.
    return torch.tensor(found, device="cpu"), torch.tensor(rounded(squares), dtype=torch.float64, device="cpu")


def check_and_unscale_reference(
    tensors: Sequence[torch.Tensor], factor: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the work of `check_and_unscale` in plain torch operations, for devices without a kernel."""
    found = torch.zeros((), dtype=torch.bool, device=device)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    # The factor is rounded to fp32, as in the kernels, and not to the dtype of each tensor.
    factor32 = torch.tensor(factor, dtype=torch.float32, device=device)
    for tensor in tensors:
        for piece in torch.split(flat(tensor.detach()), PIECE_ELEMENTS):
            if factor != 1.0:
                piece.copy_(piece.float() * factor32)
            found |= ~torch.isfinite(piece).all()
            squares += piece.double().square_().sum()
    return found, squares
