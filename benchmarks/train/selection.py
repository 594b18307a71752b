"""Lists the systems to measure with each workload: by default, with --full, and in the part "limits"."""

from __future__ import annotations

__all__ = ["FULL", "HEADLINE", "LIMITS", "Cells"]

# The systems that train each workload. The keys are the names of workloads; the values are names of `SYSTEMS`.
Cells = dict[str, tuple[str, ...]]

_INFINITY = ("zero-infinity", "zero-infinity-pipelined")
_PEERS = (*_INFINITY, "zero-infinity-params-in-ram", "zero-offload", "fsdp2-offload")
_COMPARED = ("torch", "memascend", "memascend-held", *_INFINITY, "zero-offload", "fsdp2-offload")
_ALL = ("torch", "memascend", "memascend-smallest", *_PEERS)
_STATES = ("memascend-bf16", "memascend-8bit")
_HELD = ("memascend-held-60", "memascend-held", "memascend-held-none")

HEADLINE: Cells = {
    "125M-1x128": ("torch", "memascend", "memascend-smallest", "memascend-meta", *_STATES, *_HELD, *_PEERS),
    "125M-8x1x128": _COMPARED,
    "125M-1x128-clip": _COMPARED,
    "125M-4x512": ("torch", "memascend", "zero-infinity-pipelined"),
}
FULL: Cells = {
    **HEADLINE,
    "25M-1x128": _ALL,
    "25M-fp16": ("torch", "memascend", "memascend-smallest", "zero-infinity", "zero-offload"),
    "125M-1x2048-checkpointed": ("torch", "memascend", "zero-infinity", "zero-offload"),
    "500M-1x128": ("torch", "memascend", "memascend-smallest", "memascend-meta", *_PEERS),
    "500M-8x1x128": ("torch", "memascend", *_INFINITY, "zero-offload", "fsdp2-offload"),
    "500M-1x128-clip": ("torch", "memascend", *_INFINITY, "zero-offload", "fsdp2-offload"),
    # The training state may be larger than the machine's memory. So in-memory torch does not train this workload, and
    # the benchmark does not compare losses.
    "1.5B-1x128": ("memascend-meta", "zero-infinity"),
}
# By default, the part "limits" finds the smallest memory cgroup in which each of these systems trains this workload.
LIMITS: Cells = {
    "500M-1x128": ("memascend-smallest", "torch", "zero-infinity", "zero-infinity-params-in-ram", "zero-offload"),
}
