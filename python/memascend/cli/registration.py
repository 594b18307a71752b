"""Checks whether CUDA can register our host memory, which copies to and from a GPU go through."""

from __future__ import annotations

from memascend import memory
from memascend.cli.finding import Finding
from memascend.errors import MemascendError

_PROBE_BYTES = 8 << 20


def examine_registration() -> Finding:
    """Register some memory, in a process that has a CUDA context."""
    subject = "registration with CUDA"
    try:
        region = memory.Region(_PROBE_BYTES, owner="doctor")
    except MemascendError as error:
        return Finding(subject=subject, found="no memory for it", verdict="fails", advice=str(error))
    with region:
        if region.pinned == "cuda":
            return Finding(subject=subject, found="possible")
        return Finding(
            subject=subject,
            found=f"refused; {region.pinned or 'nothing'} instead",
            verdict="slower",
            advice=f"{region.why_not}; {memory.UNREGISTERED}",
        )
