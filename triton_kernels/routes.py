"""Chooses the implementation for a device, with the reason: Rust, Triton or plain torch."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import torch

from memascend import _core

# bfloat16 arithmetic in Triton needs Ampere; the tests compile the kernels ahead of time for 8.0 to 12.0.
CAPABILITY_MIN = (8, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """The implementation for a device.

    Attributes:
        name: "rust", "triton" or "torch".
        why: the instruction set of "rust"; the compute capability of "triton"; why no kernel is available, for "torch".
    """

    name: str
    why: str


def route(device: torch.device | str) -> Route:
    """Returns the implementation for tensors on `device`, with the reason.

    Args:
        device: "cpu", "cuda:0" and so on.

    Returns:
        The route. "torch" works everywhere and is slow; its `why` says what is missing.
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
        return Route(name="torch", why=f"{found} is older than 8.0, which the Triton kernels need")
    return Route(name="triton", why=found)
