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


# The number of elements that `check_and_unscale_reference` converts to float64 at a time. The temporary tensors then
# take at most 32 MiB.
PIECE_ELEMENTS = 1 << 22
# The number of bytes that one thread checks in one or two milliseconds. `checked` uses one thread for a tensor of at
# most this size.
_ALONE_BYTES = 16 << 20


def check_and_unscale(
    grads: torch.Tensor | Iterable[torch.Tensor], inv_scale: float = 1.0, *, threads: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiplies gradients by `inv_scale` in place, finds non-finite elements and sums the squares, in one pass.

    Converts each element to fp32, multiplies it once, and rounds the product to the dtype of its tensor. Writes nothing
    if `inv_scale` is 1. Both results describe the products. The sum of squares is exact, and is rounded once at the
    end. So the result is bit-identical for any order, any number of threads, any division into tensors, and any device
    that has a kernel. On a device without a kernel, each addition rounds.

    With the Triton kernels, the call only queues work: one launch for each dtype in the list and one for the rounding.
    The call does not wait for the device, but reading a result does.

    Args:
        grads: one or several contiguous tensors of fp32, bf16 or fp16, on one device. A tensor may be empty.
        inv_scale: the factor; must be finite in fp32.
        threads: the number of threads on CPU; None means `torch.get_num_threads()`.

    Returns:
        `found_nonfinite` (bool) and `squared_norm` (float64), both 0-dim and on the device of the gradients.
        `squared_norm` is inf or NaN if an element is not finite.

    Raises:
        ConfigError: an argument is not as described above, or two tensors overlap and `inv_scale` is not 1. The message
            names the argument or the tensors. Nothing has been changed.
    """
    tensors = [grads] if isinstance(grads, torch.Tensor) else list(grads)
    factor = factor_of("inv_scale", inv_scale)
    count = threads_of(threads)
    names = ["grads"] if isinstance(grads, torch.Tensor) else [f"grads[{i}]" for i in range(len(tensors))]
    for name, tensor in zip(names, tensors, strict=True):
        require(name, tensor)
        if tensor.device != tensors[0].device:
            raise ConfigError(f"{name} is on {tensor.device}, but {names[0]} is on {tensors[0].device}: use one device")
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
    """Returns whether an element of `values` is not finite, and the exact sum of squares.

    If an element is not finite, returns inf or NaN instead of the sum. `values` must be in host memory.
    """
    require("values", values)
    place = values.data_ptr(), FLOATS.index(values.dtype), values.numel()
    # torch's threads spin after an operation. For a small tensor, they would delay our threads for longer than one
    # thread needs to check the tensor.
    threads = torch.get_num_threads() if values.nbytes > _ALONE_BYTES else 1
    return _core.kernel_check([place] if values.numel() else [], 1.0, threads)


def begin_check(tensors: Sequence[torch.Tensor], sums: torch.Tensor) -> None:
    """Queues the check of tensors on a device. Does not wait for the device.

    Args:
        tensors: the tensors to check, with the requirements of `check_and_unscale`. The current stream reads these
            tensors.
        sums: a result of `new_sums` with one row for each tensor. The check adds to the rows, and `found_in` reads the
            rows.
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
    # Pass `device`, because torch's default device may not be the CPU.
    return torch.tensor(found, device="cpu"), torch.tensor(rounded(squares), dtype=torch.float64, device="cpu")


def check_and_unscale_reference(
    tensors: Sequence[torch.Tensor], factor: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the work of `check_and_unscale` with plain torch operations, for devices without a kernel."""
    found = torch.zeros((), dtype=torch.bool, device=device)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    # Round the factor to fp32, as the kernels do, instead of to the dtype of each tensor.
    factor32 = torch.tensor(factor, dtype=torch.float32, device=device)
    for tensor in tensors:
        for piece in torch.split(flat(tensor.detach()), PIECE_ELEMENTS):
            if factor != 1.0:
                piece.copy_(piece.float() * factor32)
            found |= ~torch.isfinite(piece).all()
            squares += piece.double().square_().sum()
    return found, squares
