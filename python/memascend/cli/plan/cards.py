"""Public figures of GPUs and of kinds of drives, which `memascend plan` knows by name; where they are from."""

from __future__ import annotations

from dataclasses import dataclass

from memascend.planning.costs import Drive

_GB, _GIB, _T = 10**9, 1 << 30, 10**12

# Of a GPU's dense 16-bit peak, what training of large blocks reaches: large products alone reach 0.7 and more, the
# operations between them are bound by memory.
REACHED = 0.5
# What CUDA, its libraries and the allocator's gaps take of a card beside tensors.
_CONTEXT = 1 << 30
# What a link of 16 lanes moves one way, of 31.5 and 63 GB/s in its specification.
_PCIE_4, _PCIE_5 = 25e9, 50e9


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


# The peak is of dense bf16 products with sums in fp32: half of what is given with sparsity.
CARDS = {
    # NVIDIA Ampere GA102 GPU Architecture, whitepaper V2, tables of the GeForce RTX 3080 and 3090
    "3080": Gpu("RTX 3080", 59.5, 10 * _GIB, _PCIE_4),
    "3090": Gpu("RTX 3090", 71, 24 * _GIB, _PCIE_4),
    # NVIDIA Ada GPU Architecture, whitepaper V2, appendix A
    "4070": Gpu("RTX 4070", 58.3, 12 * _GIB, _PCIE_4),
    "4070ti": Gpu("RTX 4070 Ti", 80.2, 12 * _GIB, _PCIE_4),
    "4080": Gpu("RTX 4080", 97.5, 16 * _GIB, _PCIE_4),
    "4090": Gpu("RTX 4090", 165, 24 * _GIB, _PCIE_4),
    # NVIDIA RTX Blackwell GPU Architecture, whitepaper V1, appendix A
    "5070ti": Gpu("RTX 5070 Ti", 87.9, 16 * _GIB, _PCIE_5),
    "5080": Gpu("RTX 5080", 112.6, 16 * _GIB, _PCIE_5),
    "5090": Gpu("RTX 5090", 209, 32 * _GIB, _PCIE_5),
    # NVIDIA RTX A6000, RTX 6000 Ada and L4, L40S: data sheets
    "a6000": Gpu("RTX A6000", 154.8, 48 * _GIB, _PCIE_4),
    "6000ada": Gpu("RTX 6000 Ada", 364, 48 * _GIB, _PCIE_4),
    "l4": Gpu("L4", 121, 24 * _GIB, _PCIE_4),
    "l40s": Gpu("L40S", 362, 48 * _GIB, _PCIE_4),
    # NVIDIA A10, A100, H100, H200 and HGX B200: data sheets
    "a10": Gpu("A10", 125, 24 * _GIB, _PCIE_4),
    "a100": Gpu("A100 80 GB", 312, 80 * _GIB, _PCIE_4),
    "a100-40": Gpu("A100 40 GB", 312, 40 * _GIB, _PCIE_4),
    "h100": Gpu("H100 SXM", 989, 80 * _GIB, _PCIE_5),
    "h100-pcie": Gpu("H100 PCIe", 756, 80 * _GIB, _PCIE_5),
    "h200": Gpu("H200", 989, 141 * _GB, _PCIE_5),
    "b200": Gpu("B200", 2250, 180 * _GB, _PCIE_5),
    # AMD Instinct MI210, MI300X and MI325X: data sheets
    "mi210": Gpu("MI210", 181, 64 * _GB, _PCIE_4),
    "mi300x": Gpu("MI300X", 1307, 192 * _GB, _PCIE_5),
    "mi325x": Gpu("MI325X", 1307, 256 * _GB, _PCIE_5),
}


# What good drives sustain, after any cache, by the generation of PCIe that they speak on four lanes, which bounds
# reading at 3.9, 7.9 and 15.8 GB/s: somewhat below the data sheets of servers' drives of 4 TB, read and written in
# sequence: Samsung PM983 (3.2 and 2.0 GB/s), Micron 7450 PRO (6.8 and 5.3), Micron 9550 PRO (14 and 10). Many drives of
# desktops write 1 to 2 GB/s once their cache is full.
DRIVES = {
    "gen3": Drive(read=3e9, write=2e9),
    "gen4": Drive(read=5e9, write=4e9),
    "gen5": Drive(read=10e9, write=8e9),
}
