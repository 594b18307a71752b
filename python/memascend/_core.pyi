"""What the Rust extension offers. Only memory, nvme, engine and kernels import it."""

import sys
from typing import Any, Literal, TypeAlias, final

__all__ = [
    "Arena",
    "ChunkRing",
    "Lease",
    "LeaseBuffer",
    "Region",
    "__version__",
    "kernel_accumulate",
    "kernel_adam",
    "kernel_cast",
    "kernel_check",
    "kernel_scalars",
    "kernel_simd",
    "memory_layout",
    "memory_limits",
    "memory_regions",
]

__version__: str

@final
class Region:
    def __new__(
        cls,
        nbytes: int,
        pin: Literal["auto", "mlock", "cuda", False],
        on_fork: Literal["copy", "wipe"],
        owner: str,
    ) -> Region: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int: ...
    @property
    def pinned(self) -> Literal["mlock", "cuda", False]: ...
    @property
    def why_not(self) -> str | None: ...
    @property
    def huge_bytes(self) -> int: ...
    @property
    def why_not_huge(self) -> str | None: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...

@final
class Arena:
    def __new__(cls, region: Region, classes: dict[int, int]) -> Arena: ...
    def lease(self, nbytes: int, seconds: float | None, owner: str) -> Lease: ...
    def stats(self) -> dict[str, Any]: ...

@final
class ChunkRing:
    def __new__(cls, region: Region, chunk_bytes: int, count: int) -> ChunkRing: ...
    def lease(self, seconds: float | None, owner: str) -> Lease: ...
    def stats(self) -> dict[str, Any]: ...

@final
class Lease:
    @property
    def nbytes(self) -> int: ...
    @property
    def returned(self) -> bool: ...
    def buffer(self) -> LeaseBuffer: ...
    def release(self) -> None: ...

@final
class LeaseBuffer:
    # The buffer protocol has been visible from Python since 3.12.
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

def memory_layout(classes: dict[int, int]) -> tuple[int, int]: ...
def memory_limits() -> dict[str, Any]: ...
def memory_regions() -> list[dict[str, Any]]: ...

# An address and the place of its dtype in memascend.kernels.arguments.FLOATS.
_Place: TypeAlias = tuple[int, int]
# The fields of memascend.kernels.scalars.Scalars, in order.
_Scalars: TypeAlias = tuple[float, float, float, float, bool, float, float, float, float, float]

def kernel_simd() -> str: ...
def kernel_scalars(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: int,
    grad_scale: float,
    maximize: bool,
) -> _Scalars: ...
def kernel_check(grads: list[tuple[int, int, int]], inv_scale: float, threads: int) -> tuple[bool, float]: ...
def kernel_adam(
    master: int,
    grad: _Place,
    exp_avg: int,
    exp_avg_sq: int,
    out16: _Place | None,
    numel: int,
    scalars: _Scalars,
    threads: int,
) -> None: ...
def kernel_cast(source: _Place, out: _Place, numel: int, threads: int) -> None: ...
def kernel_accumulate(grad: _Place, total: _Place, numel: int, threads: int) -> None: ...
