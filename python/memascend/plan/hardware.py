"""Lists specifications of GPUs and drives, finds this machine's GPU, and measures matrix products on its processor."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from memascend.plan.cost import Drive

_GB, _GIB, _TB = 10**9, 1 << 30, 10**12
# The part of the peak speed that training is assumed to reach. The peak of a GPU is its dense 16-bit peak. The peak of
# a processor is the result of `product_flops`. Large products reach 0.7 or more of a GPU's peak, but the operations
# between products are limited by memory.
REACHED = 0.5
# Bytes of a GPU's memory that CUDA, CUDA's libraries and the gaps of torch's allocator take.
_CONTEXT = 1 << 30
# Assumed bytes a second over 16 lanes of PCIe 3, 4 and 5, in one direction. The specifications allow 15.8, 31.5 and 63
# GB/s.
_PCIE_3, _PCIE_4, _PCIE_5 = 12e9, 25e9, 50e9


@dataclass(frozen=True)
class Gpu:
    """The specification of a GPU."""

    name: str
    tflops: float  # peak, in 10**12 operations a second
    nbytes: int  # bytes of memory
    link: float  # bytes a second between host and GPU, in each direction
    bf16: bool = True  # False if only fp16 reaches the peak, because the GPU has no units for bf16

    @property
    def usable(self) -> int:
        """Bytes of memory that are free for tensors."""
        return max(0, self.nbytes - _CONTEXT)

    @property
    def flops(self) -> float:
        """The operations a second that training is assumed to reach."""
        return self.tflops * _TB * REACHED


# Each peak is for dense 16-bit products with sums in fp32. Data sheets often give the peak with sparsity, which is
# twice as high. On GeForce cards since Ampere, the peak here is twice the fp32 peak (cores x 2 x boost clock).
_CARDS = (
    # Sources: data sheets of T4 and V100, whitepaper "NVIDIA Turing GPU Architecture". These cards have no units for
    # bf16, so the peaks are of fp16.
    Gpu("T4", 65, 15 * _GIB, _PCIE_3, bf16=False),  # error correction takes 1 of the 16 GiB
    Gpu("V100 16 GB", 125, 16 * _GIB, _PCIE_3, bf16=False),
    Gpu("V100 32 GB", 125, 32 * _GIB, _PCIE_3, bf16=False),
    Gpu("RTX 2080 Ti", 53.8, 11 * _GIB, _PCIE_3, bf16=False),
    # Source: whitepaper "NVIDIA Ampere GA102 GPU Architecture", V2. If a card is not in it, the peak is computed from
    # cores and clock.
    Gpu("RTX 3060", 25.5, 12 * _GIB, _PCIE_4),
    Gpu("RTX 3060 Ti", 32.4, 8 * _GIB, _PCIE_4),
    Gpu("RTX 3070", 40.6, 8 * _GIB, _PCIE_4),
    Gpu("RTX 3070 Ti", 43.5, 8 * _GIB, _PCIE_4),
    Gpu("RTX 3080", 59.5, 10 * _GIB, _PCIE_4),
    Gpu("RTX 3080 Ti", 68.2, 12 * _GIB, _PCIE_4),
    Gpu("RTX 3090", 71, 24 * _GIB, _PCIE_4),
    Gpu("RTX 3090 Ti", 80, 24 * _GIB, _PCIE_4),
    # Source: whitepaper "NVIDIA Ada GPU Architecture", V2. If a card is not in it, the peak is computed from cores and
    # clock. The cards with `_PCIE_4 / 2` have 8 lanes of PCIe.
    Gpu("RTX 4060", 30.2, 8 * _GIB, _PCIE_4 / 2),
    Gpu("RTX 4060 Ti 8 GB", 44.1, 8 * _GIB, _PCIE_4 / 2),
    Gpu("RTX 4060 Ti 16 GB", 44.1, 16 * _GIB, _PCIE_4 / 2),
    Gpu("RTX 4070", 58.3, 12 * _GIB, _PCIE_4),
    Gpu("RTX 4070 Super", 71, 12 * _GIB, _PCIE_4),
    Gpu("RTX 4070 Ti", 80.2, 12 * _GIB, _PCIE_4),
    Gpu("RTX 4070 Ti Super", 88.2, 16 * _GIB, _PCIE_4),
    Gpu("RTX 4080", 97.5, 16 * _GIB, _PCIE_4),
    Gpu("RTX 4080 Super", 104.4, 16 * _GIB, _PCIE_4),
    Gpu("RTX 4090", 165, 24 * _GIB, _PCIE_4),
    # Source: whitepaper "NVIDIA RTX Blackwell GPU Architecture", V1. If a card is not in it, the peak is computed from
    # cores and clock.
    Gpu("RTX 5060", 38.4, 8 * _GIB, _PCIE_5 / 2),
    Gpu("RTX 5060 Ti 8 GB", 47.4, 8 * _GIB, _PCIE_5 / 2),
    Gpu("RTX 5060 Ti 16 GB", 47.4, 16 * _GIB, _PCIE_5 / 2),
    Gpu("RTX 5070", 61.7, 12 * _GIB, _PCIE_5),
    Gpu("RTX 5070 Ti", 87.9, 16 * _GIB, _PCIE_5),
    Gpu("RTX 5080", 112.6, 16 * _GIB, _PCIE_5),
    Gpu("RTX 5090", 209, 32 * _GIB, _PCIE_5),
    # Sources: data sheets of NVIDIA RTX A4000, A5000, A6000, 6000 Ada and Pro 6000 Blackwell, L4, L40 and L40S.
    Gpu("RTX A4000", 76.7, 16 * _GIB, _PCIE_4),
    Gpu("RTX A5000", 111.1, 24 * _GIB, _PCIE_4),
    Gpu("RTX A6000", 154.8, 48 * _GIB, _PCIE_4),
    Gpu("RTX 6000 Ada", 364, 48 * _GIB, _PCIE_4),
    Gpu("RTX Pro 6000", 503.8, 96 * _GIB, _PCIE_5),
    Gpu("L4", 121, 24 * _GIB, _PCIE_4),
    Gpu("L40", 181, 48 * _GIB, _PCIE_4),
    Gpu("L40S", 362, 48 * _GIB, _PCIE_4),
    # Sources: data sheets of NVIDIA A10, A10G, A40, A100, H100, H200 and HGX B200.
    Gpu("A10", 125, 24 * _GIB, _PCIE_4),
    Gpu("A10G", 70, 24 * _GIB, _PCIE_4),
    Gpu("A40", 149.7, 48 * _GIB, _PCIE_4),
    Gpu("A100 40 GB", 312, 40 * _GIB, _PCIE_4),
    Gpu("A100 80 GB", 312, 80 * _GIB, _PCIE_4),
    Gpu("H100 SXM", 989, 80 * _GIB, _PCIE_5),
    Gpu("H100 PCIe", 756, 80 * _GIB, _PCIE_5),
    Gpu("H200", 989, 141 * _GB, _PCIE_5),
    Gpu("B200", 2250, 180 * _GB, _PCIE_5),
    # Sources: data sheets of AMD Instinct MI210, MI300X and MI325X.
    Gpu("MI210", 181, 64 * _GB, _PCIE_4),
    Gpu("MI300X", 1307, 192 * _GB, _PCIE_5),
    Gpu("MI325X", 1307, 256 * _GB, _PCIE_5),
)


def short_name(name: str) -> str:
    """Returns a GPU's name in the form of the keys of `CARDS`: "4060ti16" for "RTX 4060 Ti 16 GB"."""
    plain = re.sub(r"^(nvidia|geforce|tesla|amd|instinct|rtx|\s|-)*", "", name.lower())
    return re.sub(r"[\s_-]+|gi?b$", "", plain)


# The GPUs by their short names.
CARDS = {short_name(card.name): card for card in _CARDS}
# For each short name that several cards share, the key in `CARDS` of the card that is assumed. Drivers report the same
# name for the 8 GB and the 16 GB version of some cards. For these names, the 8 GB card is assumed, so that a run that
# `plan` accepts fits both cards.
USUAL = {"4060ti": "4060ti8", "5060ti": "5060ti8", "v100": "v10016", "a100": "a10080", "h100": "h100sxm"}
# The terabytes that the warranty of a consumer drive allows to write, for each terabyte of the drive's size. Warranties
# of server drives allow 2 to 10 times this number.
ENDURANCE_PER_TB = 600
# Sustained speeds of good drives, by generation of PCIe. They do not exceed the sequential read and write speeds in the
# data sheets of 4 TB server drives: Samsung PM983 (3.2 and 2.0 GB/s), Micron 7450 PRO (6.8 and 5.3 GB/s), Micron 9550
# PRO (14 and 10 GB/s). Many desktop drives write only 1 to 2 GB/s once their cache is full.
DRIVES = {
    "gen3": Drive(read=3e9, write=2e9),
    "gen4": Drive(read=5e9, write=4e9),
    "gen5": Drive(read=10e9, write=8e9),
}


# The drive that `memascend plan` assumes without `--drive` and `--storage`, and that a Trainer's forecast assumes.
ASSUMED_DRIVE = "gen4"

# Matches suffixes that drivers add to a card's name: connector, memory, edition. Does not match "laptop", because a
# laptop card is a different card even if its number is the same.
_MAKE = re.compile(r"(sxm\d?|pcie|nvl|hbm\d\w?|oam|[1-9]\d+(gb?)?|generation|blackwell\w*edition)*")


def gpu_here() -> Gpu | None:
    """Returns the specification of this machine's GPU, found by the name that the GPU's driver reports.

    Returns None if torch cannot use a GPU, or if the name is unknown. Imports torch, which takes seconds, only if the
    system has a device file of a GPU.
    """
    if not has_device_file():
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    short, nbytes = short_name(torch.cuda.get_device_name()), torch.cuda.get_device_properties(None).total_memory
    same = (name for name in (*CARDS, *USUAL) if short.startswith(name) and _MAKE.fullmatch(short[len(name) :]))
    known = max(same, key=len, default=None)
    return None if known is None else replace(CARDS[USUAL.get(known, known)], nbytes=nbytes)


def has_device_file() -> bool:
    """True if the system has a device file of a GPU. The GPU's driver may still be missing."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


# `product_flops` multiplies square matrices of `_SIDE` rows for `_SECONDS` seconds. The products of a typical
# transformer block have about this size.
_SIDE, _SECONDS = 1024, 0.3
# If products in a dtype take this many times the time of float32 products, users are told. Without units for bfloat16,
# an AVX2 processor takes about 7 times as long in a forward, and 120 times in a backward.
SLOW = 4


def slowdown(dtype: str, flops: float) -> float:
    """Measures how many times longer this processor takes for a matrix product in `dtype` than in float32.

    `flops` is the result of `product_flops(dtype)`.
    """
    return 1.0 if dtype == "float32" else product_flops("float32") / flops


def slowdown_in_words(dtype: str, times: float) -> str:
    """Returns the end of a sentence about this processor, with advice for users; "" if `times` is less than `SLOW`."""
    if times < SLOW:
        return ""
    return f"; it computes {dtype} {times:,.0f} times slower than float32, so use --dtype float32"


def product_flops(dtype: str) -> float:
    """Measures how many operations a second this processor reaches in a matrix product with all threads of torch.

    `dtype` is the dtype of the matrices.
    """
    import torch

    kind: torch.dtype = getattr(torch, dtype)

    # linear() multiplies in the same way as the layers of a model. For some dtypes, other products are many times
    # slower.
    product = torch.nn.functional.linear
    # A separate generator leaves the program's random numbers unchanged.
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.rand(_SIDE, _SIDE, generator=generator).to(kind) for _ in range(2))
    # The first product also loads libraries and maps memory, so the time of the first product is not measured.
    product(first, second)
    shortest, began = float("inf"), time.perf_counter()
    while shortest == float("inf") or time.perf_counter() - began < _SECONDS:
        before = time.perf_counter()
        product(first, second)
        shortest = min(shortest, time.perf_counter() - before)
    return 2 * _SIDE**3 / shortest
