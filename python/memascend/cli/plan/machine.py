"""Reads what is said of a machine: its GPU, its drive; the figures that are assumed of them stand here."""

from __future__ import annotations

from dataclasses import dataclass

from memascend.errors import ConfigError
from memascend.planning.costs import Drive

_GB, _GIB, _T = 10**9, 1 << 30, 10**12

# Of a GPU's dense 16-bit peak, what training of large blocks reaches: large products alone reach 0.7 and more, the
# operations between them are bound by memory.
REACHED = 0.5
# What CUDA, its libraries and the allocator's gaps take of a card beside tensors.
_CONTEXT = 1 << 30
# Python, torch and transformers in host memory, before there is a model.
IMPORTS = 740 << 20
# Terabytes written that consumer drives are warranted for, for each terabyte of size; those of servers have 2 to 10
# times as much.
ENDURANCE_PER_TB = 600


@dataclass(frozen=True)
class Gpu:
    """What is known of a GPU: its peak, its memory, its link; 10**12 operations, bytes, bytes a second."""

    name: str
    tflops: float
    nbytes: int
    link: float

    @property
    def usable(self) -> int:
        """Memory for tensors."""
        return max(0, self.nbytes - _CONTEXT)

    @property
    def flops(self) -> float:
        """Operations a second that training reaches."""
        return self.tflops * _T * REACHED


# Dense bf16 with sums in fp32, memory, and what a PCIe 4.0 or 5.0 link of 16 lanes moves one way.
_GPUS = {
    "4090": Gpu("RTX 4090", 165, 24 * _GIB, 25e9),
    "5090": Gpu("RTX 5090", 209, 32 * _GIB, 50e9),
    "a100": Gpu("A100 80 GB", 312, 80 * _GIB, 25e9),
    "h100": Gpu("H100 SXM", 989, 80 * _GIB, 50e9),
    "h200": Gpu("H200", 989, 141 * _GB, 50e9),
}


def parse_gpu(text: str) -> Gpu:
    """A name, or TFLOPS,GB,PCIE_GB_S: the peak of dense 16-bit products, the memory, the link's speed one way.

    Raises:
        ConfigError: it is neither.
    """
    known = _GPUS.get(text.lower().removeprefix("rtx").strip())
    if known is not None:
        return known
    try:
        tflops, memory, link = _positive(text, 3)
    except ValueError as error:
        raise ConfigError(
            f"--gpu is one of {', '.join(_GPUS)}, or TFLOPS,GB,PCIE_GB_S as 165,24,25, and not {text!r}"
        ) from error
    return Gpu(f"GPU of {tflops:g} TFLOPS and {memory:g} GB", tflops, int(memory * _GB), link * _GB)


def parse_drive(text: str) -> Drive:
    """READ,WRITE in GB/s, of all devices together, as they last: not a cache's speed.

    Raises:
        ConfigError: it is not that.
    """
    try:
        read, write = _positive(text, 2)
    except ValueError as error:
        raise ConfigError(f"--drive is READ,WRITE in GB/s, as 5,4, and not {text!r}") from error
    return Drive(read=read * _GB, write=write * _GB)


def _positive(text: str, count: int) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if len(values) != count or not all(0 < value < float("inf") for value in values):
        raise ValueError(text)
    return values
