"""Implements `memascend doctor`: checks this machine, and gives advice on parts that are slow or fail."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from memascend import memory
from memascend.cli.storage import Finding, examine_ring, examine_storage
from memascend.errors import MemascendError
from memascend.text import bytes_shown, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


_PROBE_BYTES = 8 << 20
_NO_BFLOAT16 = (
    "this processor has no units for bfloat16: without a GPU, train models in float32, with `--dtype float32` for "
    "`memascend train`, or `dtype=torch.float32` for `from_pretrained()`"
)


def examine_registration() -> Finding:
    """Tries to register memory with CUDA, and returns the result. The process must already have a CUDA context."""
    subject = "registration with CUDA"
    with memory.Region(_PROBE_BYTES, owner="doctor") as region:
        if region.pinned == "cuda":
            return Finding(subject=subject, found="possible")
        return Finding(
            subject=subject,
            found=f"not possible; {region.pinned or 'nothing'} is used instead",
            verdict="slower",
            advice=f"{region.why_not}; {memory.UNREGISTERED}",
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--storage", metavar="P", help="also look at this folder, file or device")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the report. Returns exit code 1 if a check fails, else 0."""
    findings = list(examine(options.storage))
    failed = any(finding.verdict == "fails" for finding in findings)
    if options.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return int(failed)
    rows = [(finding.subject, finding.verdict, finding.found) for finding in findings]
    print(table(("what", "verdict", "found"), rows))
    for finding in findings:
        if finding.advice:
            print(f"\n{finding.subject}: {finding.advice}")
    return int(failed)


def examine(storage: str | None) -> Iterator[Finding]:
    """Runs all checks, and yields the findings of each check."""
    for check in (_system, _memory, _regions, examine_ring, _torch, _triton, _kernels):
        try:
            yield from check()
        except MemascendError as error:
            yield _failed(check.__name__.removeprefix("_"), error)
    if storage is not None:
        yield from examine_storage(Path(storage))


def _failed(subject: str, error: MemascendError) -> Finding:
    return Finding(subject=subject, found="not available", verdict="fails", advice=str(error))


def _system() -> Iterator[Finding]:
    yield Finding(subject="system", found=f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Finding(subject="python", found=platform.python_version())
    yield Finding(subject="memascend", found=importlib.metadata.version("memascend"))
    yield Finding(subject="processor", found=f"{len(os.sched_getaffinity(0))} cores")


def _memory() -> Iterator[Finding]:
    limits = memory.limits()
    yield Finding(subject="memory", found=f"{bytes_shown(limits['available'])} free ({limits['limited_by']})")
    if limits["cgroup_limit"] is not None:
        yield Finding(subject="cgroup limit", found=f"{bytes_shown(limits['cgroup_limit'])} ({limits['cgroup']})")
    soft = limits["memlock_soft"]
    if soft is None or os.geteuid() == 0:
        found = "unlimited" if soft is None else f"{bytes_shown(soft)}, which does not limit root"
        yield Finding(subject="memlock limit", found=found)
        return
    yield Finding(
        subject="memlock limit",
        found=bytes_shown(soft),
        verdict="slower",
        advice="memory beyond this limit cannot be pinned; raise the limit with `ulimit -l`, `memlock` in "
        "/etc/security/limits.conf, LimitMEMLOCK= in systemd, or `docker run --ulimit memlock=-1`",
    )


def _regions() -> Iterator[Finding]:
    with memory.Region(_PROBE_BYTES, owner="doctor") as region:
        yield Finding(
            subject="huge pages",
            found=f"{bytes_shown(region.huge_bytes)} of {bytes_shown(region.mapped_bytes)}",
            verdict="slower" if region.why_not_huge else "fine",
            advice=region.why_not_huge or "",
        )
        yield Finding(
            subject="pinning",
            found=region.pinned or "none",
            verdict="fine" if region.pinned else "slower",
            advice="" if region.pinned else region.why_not or "",
        )


def _torch() -> Iterator[Finding]:
    import torch

    from memascend.plan.hardware import SLOW, product_flops, slowdown

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Finding(subject="torch", found=f"{torch.__version__}, {built}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        yield Finding(subject="GPU", found="none; models compute on the CPU")
        times = slowdown("bfloat16", product_flops("bfloat16"))
        yield Finding(
            subject="bfloat16 on cpu",
            found=f"products take {times:.2g} times as long as in float32",
            verdict="fine" if times < SLOW else "slower",
            advice="" if times < SLOW else _NO_BFLOAT16,
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        about = f"{properties.name}, {bytes_shown(properties.total_memory)}, {properties.major}.{properties.minor}"
        yield Finding(subject=f"GPU {index}", found=about)
    # Creates a CUDA context, without which registration with CUDA fails.
    torch.zeros(1, device="cuda")
    try:
        yield examine_registration()
    except MemascendError as error:
        yield _failed("registration with CUDA", error)


def _triton() -> Iterator[Finding]:
    # Nightly and ROCm builds of torch install the package triton from a distribution with another name, so the name of
    # the distribution is looked up.
    names = importlib.metadata.packages_distributions().get("triton", [])
    absent = "not installed; memascend uses torch's own operations on a GPU"
    yield Finding(subject="triton", found=importlib.metadata.version(names[0]) if names else absent)


def _kernels() -> Iterator[Finding]:
    import torch

    from memascend import kernels

    for device in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
        try:
            route = kernels.route(device)
        except MemascendError as error:
            yield _failed(f"kernels on {device}", error)
            continue
        slow = route.name == "torch" or route.why == "portable"
        advice = f"several times slower than it could be: {route.name}, because {route.why}" if slow else ""
        if route.why == "portable":
            advice = "arithmetic for any processor, several times slower than with AVX2, AVX-512 or NEON"
        yield Finding(
            subject=f"kernels on {device}",
            found=f"{route.name} ({route.why})",
            verdict="slower" if slow else "fine",
            advice=advice,
        )
