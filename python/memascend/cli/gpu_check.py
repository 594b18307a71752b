"""Checks a GPU in two minutes: pinning, copies, bits of the kernels and of a small training. Writes a report file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from memascend import kernels, memory
from memascend.cli.storage import Finding, registration_of
from memascend.memory import Region
from memascend.session.offload import offload
from memascend.tensors import rounded, same_bits, total
from memascend.text import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PINNED_BYTES = 256 << 20
_COPIES = 8
# Sizes beside the boundaries of a kernel's blocks.
_SIZES = (1, 2047, 2049, 32_769, 1_000_003)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDTH, _BLOCKS, _BATCH, _STEPS = 256, 4, 64, 4
_LR, _BETAS, _EPS, _DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1
Figures = dict[str, Any]
Waits = Literal["fused", "ssd", "ram"]


def run(output: Path, machine: Callable[[], dict[str, str]], *, as_json: bool) -> int:
    """Check the current device, print the report, write the file. Exit code 2 without a device, 1 for a failure."""
    # cuBLAS reads it with the context; with it, each run has the same bits.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if (missing := _missing()) is not None:
        print(f"memascend doctor --gpu: {missing}; nothing was checked, and nothing written", file=sys.stderr)
        return 2
    if not output.parent.is_dir():
        print(f"memascend doctor --gpu: there is no folder {output.parent} for --output", file=sys.stderr)
        return 2
    # First, as a check that fails may leave a device that answers nothing.
    about = {**machine(), "link": _link()}
    with tempfile.TemporaryDirectory(prefix=".memascend-gpu-", dir=output.parent) as folder:
        report = checked(torch.device("cuda", torch.cuda.current_device()), Path(folder))
    report["machine"] = about
    text = json.dumps(report, indent=1) + "\n"
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(output)
    print(text if as_json else shown(report), end="")
    print(f"{output}: attach this file to a report", file=sys.stderr if as_json else sys.stdout)
    return 0 if report["ok"] else 1


def _missing() -> str | None:
    """The reason why there is no device."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a build for CUDA: install one as https://pytorch.org says"
    with warnings.catch_warnings():
        # torch warns about the driver; the message below has advice.
        warnings.simplefilter("ignore")
        there = torch.cuda.is_available()
    if not there:
        return "torch sees no CUDA device: look at nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES"
    return None


def checked(device: torch.device, folder: Path) -> dict[str, Any]:
    """The report of all checks. A check that raises is recorded, and the others still run."""
    checks: dict[str, Callable[[], Iterator[tuple[Finding, Figures]]]] = {
        "pinning": lambda: _pinning(device),
        "copies": lambda: _copies(device),
        "kernels": lambda: _kernels(device),
        "training": lambda: _training(device, folder),
    }
    entries, ok = [], True
    for name, check in checks.items():
        began = time.perf_counter()
        results: list[dict[str, Any]] = []
        try:
            results.extend({**asdict(finding), "figures": figures} for finding, figures in check())
        except Exception as error:  # noqa: BLE001
            failure = Finding(subject=name, found=f"{type(error).__name__}: {error}", verdict="fails")
            results.append({**asdict(failure), "figures": {}, "trace": traceback.format_exc()})
        ok = ok and all(result["verdict"] != "fails" for result in results)
        entries.append({"check": name, "seconds": round(time.perf_counter() - began, 3), "findings": results})
    return {"ok": ok, "machine": {}, "checks": entries}


def shown(report: dict[str, Any]) -> str:
    """The report as text."""
    about = "\n".join(f"{name}: {value}" for name, value in report["machine"].items() if value is not None)
    found = [finding for entry in report["checks"] for finding in entry["findings"]]
    rows = [(finding["subject"], finding["verdict"], finding["found"]) for finding in found]
    advice = [f"\n{finding['subject']}: {finding['advice']}\n" for finding in found if finding["advice"]]
    return f"{about}\n\n{table(('what', 'verdict', 'found'), rows)}\n{''.join(advice)}"


def _link() -> str | None:
    """The driver's version and the link of the device."""
    asked = "name,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return done.stdout.strip()
    return None


# --- memory -------------------------------------------------------------------------


def _pinning(device: torch.device) -> Iterator[tuple[Finding, Figures]]:
    # Registration needs a CUDA context, which this makes.
    torch.zeros(1, device=device)
    began = time.perf_counter()
    with Region(_PINNED_BYTES, owner="doctor") as region:
        seconds = time.perf_counter() - began
        figures = {"pinned": region.pinned, "why_not": region.why_not, "bytes": _PINNED_BYTES, "seconds": seconds}
        found = f"registered with CUDA, {_PINNED_BYTES / seconds / 1e9:.1f} GB/s"
        yield registration_of(region, "pinning", found), figures


def _copies(device: torch.device) -> Iterator[tuple[Finding, Figures]]:
    with memory.ChunkRing(_PINNED_BYTES, 1) as ring:
        figures, same = _copied(device, ring.lease(owner="doctor").tensor(_PINNED_BYTES, torch.uint8))
    wrong = "" if same else "what was copied to the device, or back, has other bits than it had"
    found = ", ".join(f"{rate / 1e9:.1f} GB/s {way}" for way, rate in figures.items())
    yield Finding(subject="copies", found=wrong or found, verdict="fine" if same else "fails", advice=wrong), figures


def _copied(device: torch.device, host: torch.Tensor) -> tuple[Figures, bool]:
    """Bytes a second of copies between host and device, and whether all bytes arrived."""
    source, back = host.chunk(2)
    there = torch.empty_like(source, device=device)
    # The period is prime, so that a missing or repeated part is noticed.
    source.copy_((torch.arange(source.numel(), dtype=torch.int32, device="cpu") % 251).to(torch.uint8))
    back.zero_()
    figures = {"to the device": _rate(device, there, source), "from the device": _rate(device, back, there)}
    return figures, torch.equal(back, source)


def _rate(device: torch.device, target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes a second, after a first copy."""

    def copied(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    copied(1)
    return _COPIES * source.nbytes / copied(_COPIES)


# --- bits -----------------------------------------------------------------------------


def _randoms(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), device="cpu")


def _compared(
    subject: str, wrong: dict[str, str], cases: int, figures: Figures | None = None
) -> tuple[Finding, Figures]:
    found, advice = f"the bits of the CPU in {cases} cases", ""
    if wrong:
        case, difference = next(iter(wrong.items()))
        found = f"{len(wrong)} of {cases} cases DIFFER"
        advice = f"{case}: {difference}; the file has all: this is a bug, or the GPU is faulty: please report it"
    verdict: Literal["fine", "fails"] = "fails" if wrong else "fine"
    finding = Finding(subject=subject, found=found, verdict=verdict, advice=advice)
    return finding, {**(figures or {}), "cases": cases, "different": wrong}


def _kernels(device: torch.device) -> Iterator[tuple[Finding, Figures]]:
    """The overflow check and norm, which every step with clipping or a loss scale takes on the device."""
    tensors: dict[str, torch.Tensor] = {}
    for dtype in _DTYPES:
        for numel in _SIZES:
            values = (_randoms(numel, numel) * 2.0 ** (_randoms(numel, 1) * 12)).to(dtype)
            tensors[f"{dtype} {numel}"] = values
            for bad in (math.inf, math.nan):
                # In the middle or at the end, where a block ends, too.
                spoilt = values.clone()
                spoilt[(numel - 1) if math.isnan(bad) else numel // 2] = bad
                tensors[f"{dtype} {numel} with {bad}"] = spoilt
    sums = kernels.new_sums(len(tensors), device)
    kernels.begin_check([values.to(device) for values in tensors.values()], sums)
    wrong: dict[str, str] = {}
    for (name, values), found in zip(tensors.items(), kernels.found_in(sums), strict=True):
        expected = kernels.checked(values)
        # Compared as text, in which NaN equals NaN.
        if str(found) != str(expected):
            wrong[name] = f"found {found[0], rounded(found[1])}, and the CPU {expected[0], rounded(expected[1])}"
    yield _compared("overflow check and norm", wrong, len(tensors))


# --- a training --------------------------------------------------------------------------


def _model(dtype: torch.dtype) -> torch.nn.Sequential:
    nn = torch.nn

    def block() -> torch.nn.Module:
        return nn.Sequential(
            nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return nn.Sequential(*(block() for _ in range(_BLOCKS)), nn.Linear(_WIDTH, 16)).to(dtype)


def _loss(model: torch.nn.Module, step: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    x = _randoms(_BATCH * _WIDTH, 100 + step).view(_BATCH, _WIDTH).to(device, dtype)
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


def _in_memory(device: torch.device, dtype: torch.dtype, clip: float | None) -> tuple[list[Any], list[torch.Tensor]]:
    """Losses and norms, and the parameters, of training on the device with updates by the CPU's kernel."""
    model = _model(dtype).to(device)
    parameters = list(model.parameters())
    masters = [p.detach().float().cpu().clone() for p in parameters]
    moments = [(torch.zeros_like(master), torch.zeros_like(master)) for master in masters]
    said: list[Any] = []
    for step in range(_STEPS):
        loss = _loss(model, step, dtype, device)
        loss.backward()
        gradients = [p.grad.detach().cpu() for p in parameters if p.grad is not None]
        norm = math.sqrt(rounded(total(kernels.checked(g.reshape(-1))[1] for g in gradients)))
        factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        for p, master, gradient, (first, second) in zip(parameters, masters, gradients, moments, strict=True):
            out = torch.empty_like(master, dtype=dtype) if dtype != torch.float32 else None
            kernels.adamw(
                master, gradient, first, second, out, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY,
                step=step + 1, grad_scale=float(torch.tensor(factor, dtype=torch.float32)),
            )  # fmt: skip
            with torch.no_grad():
                p.copy_(master if out is None else out)
        model.zero_grad()
        said.append((loss.item(), norm))
    return said, [p.detach().cpu() for p in parameters]


def _offloaded(
    device: torch.device,
    dtype: torch.dtype,
    clip: float | None,
    folder: Path,
    gradients: Waits,
) -> tuple[list[Any], list[torch.Tensor]]:
    model = _model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY)
    store = folder / f"{gradients}.store"
    model, offloaded = offload(model, optimizer, storage=store, device=device, gradients=gradients, max_grad_norm=clip)
    said: list[Any] = []
    with offloaded:
        for step in range(_STEPS):
            loss = _loss(model, step, dtype, device)
            loss.backward()
            offloaded.step()
            offloaded.zero_grad()
            said.append((loss.item(), offloaded.grad_norm))
        return said, [value.clone() for value in model.state_dict().values()]


def _training(device: torch.device, folder: Path) -> Iterator[tuple[Finding, Figures]]:
    wrong: dict[str, str] = {}
    figures: Figures = {}
    cases: list[tuple[Waits, torch.dtype, float | None]] = [
        ("fused", torch.float32, None),
        ("ssd", torch.bfloat16, 0.01),
        ("ram", torch.bfloat16, 0.01),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for gradients, dtype, clip in cases:
            name = f"{gradients}, {dtype}"
            said, expected = _in_memory(device, dtype, clip)
            # Both sides compute on the same device, and update on the host.
            again, found = _offloaded(device, dtype, clip, folder, gradients)
            figures[name] = {"losses": [str(loss) for loss, _ in again], "norms": [str(norm) for _, norm in again]}
            if said != again:
                wrong[f"{name}, losses and norms"] = f"{again}, and in memory {said}"
            differing = sum(not same_bits(one, other) for one, other in zip(found, expected, strict=True))
            if differing:
                wrong[f"{name}, parameters"] = f"{differing} of {len(expected)} have other bits"
    figures["warnings"] = sorted({str(one.message) for one in caught})
    yield _compared(f"training of {_STEPS} steps", wrong, 2 * len(cases), figures)
