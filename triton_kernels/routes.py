"""Chooses the implementation of the kernels for a device: Rust, Triton or plain torch."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import torch

from memascend import _core

# bfloat16 arithmetic in Triton requires compute capability 8.0 (Ampere). The tests compile the kernels for 8.0,
# 9.0, 10.0 and 12.0.
CAPABILITY_MIN = (8, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """The implementation of the kernels for a device.

    Attributes:
        name: "rust", "triton" or "torch".
        why: for "rust", the instruction set; for "triton", the compute capability; for "torch", the reason why no
            kernel is available.
    """

    name: str
    why: str


def route(device: torch.device | str) -> Route:
    """Returns the implementation for tensors on `device`, and the reason for it.

    Args:
        device: "cpu", "cuda:0" and so on.

    Returns:
        The route. "torch" works on every device, but is slow. Its `why` names what is missing for a kernel.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu()
    if device.type != "cuda":
        return Route(name="torch", why=f"there are no kernels for {device.type} devices")
    if torch.version.hip is not None:
        return Route(name="torch", why="the kernels are compiled and tested for NVIDIA GPUs only")
    if importlib.util.find_spec("triton") is None:
        return Route(name="torch", why="triton is not installed: pip install triton")
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda(torch.cuda.get_device_capability(index))


@functools.cache
def _cpu() -> Route:
    return Route(name="rust", why=_core.kernel_simd())


@functools.cache
def _cuda(capability: tuple[int, int]) -> Route:
    found = f"compute capability {capability[0]}.{capability[1]}"
    if capability < CAPABILITY_MIN:
        return Route(name="torch", why=f"{found} is too old; the Triton kernels need 8.0 or newer")
    return Route(name="triton", why=found)
