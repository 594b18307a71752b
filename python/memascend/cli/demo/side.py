"""Runs one side of the demonstration in a process of its own: one training step for each line on standard input.

Each answer is a line of JSON. A process of its own makes its peak of memory its own, and lets it be killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from memascend.cli.bench import process
from memascend.cli.demo.model import ByteModel
from memascend.cli.demo.text import batch, read_text
from memascend.cli.demo.turns import Settings
from memascend.errors import ConfigError, MemascendError
from memascend.run.offloading import offload
from memascend.tensors import memory_of

if TYPE_CHECKING:
    from memascend.run.optimizer import OffloadedOptimizer

_LR = 1e-3


def main() -> None:
    """Train as told, until told to end or until nobody is there to tell."""
    settings = Settings(**json.loads(sys.argv[1]))
    try:
        _train(settings)
    except MemascendError as error:
        _answer(error=str(error))


def _train(settings: Settings) -> None:
    # On one thread torch's fused AdamW has the bits of ours.
    torch.set_num_threads(1)
    text = read_text()
    _warm_up()
    imported = process.resident()
    torch.manual_seed(0)
    model: torch.nn.Module = ByteModel(settings.layers, settings.width, settings.length)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
    offloaded: OffloadedOptimizer | None = None
    if settings.storage is not None:
        model, offloaded = offload(
            model,
            optimizer,
            storage=settings.storage,
            existing="resume",
            device="cpu",
            host_memory=settings.host_memory,
        )
        optimizer = offloaded
    with contextlib.suppress(OSError):
        # Some containers forbid it, and then the peak is that of the whole process.
        process.restart_peak()
    done = offloaded.steps if offloaded else 0
    last = (offloaded.user_state or {}) if offloaded else {}
    parameters, held = (sum(one.numel() for one in some) for some in (model.parameters(), _held(model, offloaded)))
    _answer(steps=done, last_loss=last.get("loss"), parameters=parameters, in_memory=held)
    for line in sys.stdin:
        if line.strip() != "step":
            break
        began = time.perf_counter()
        loss = model(batch(text, done, settings.rows, settings.length))
        loss.backward()
        if offloaded:
            offloaded.user_state = {"loss": loss.item()}
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        seconds = time.perf_counter() - began
        held, peak = (max(0, bytes_now - imported) for bytes_now in (process.resident(), process.resident_peak()))
        _answer(step=done, loss=loss.item(), seconds=seconds, held=held, peak=peak, imported=imported)
    _answer(digest=_digest(model), **_reported(offloaded, settings.picture))


def _held(model: torch.nn.Module, offloaded: OffloadedOptimizer | None) -> list[torch.nn.Parameter]:
    """Parameters that are held in memory with their state."""
    held = offloaded.plan.held if offloaded else ()
    return [parameter for name, parameter in model.named_parameters() if name in held]


def _reported(offloaded: OffloadedOptimizer | None, picture: str | None) -> dict[str, Any]:
    if offloaded is None:
        return {}
    report = offloaded.report()
    drawn = None
    if picture is not None:
        with contextlib.suppress(ConfigError):
            report.plot(picture)
            drawn = picture
    counted = {"in_memory": report.in_memory.total, "offloaded": report.peak}
    return {"report": report.to_dict(), "counted": counted, "picture": drawn, "disk": offloaded.plan.disk_bytes}


def _warm_up() -> None:
    """Let torch take what it takes whatever is trained."""
    model = ByteModel(1, 64, 16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.zeros((1, 17), dtype=torch.long)).backward()
    optimizer.step()


def _digest(model: torch.nn.Module) -> str:
    """SHA-256 of all parameters."""
    hasher = hashlib.sha256()
    for tensor in model.state_dict().values():
        hasher.update(memory_of(tensor))
    return hasher.hexdigest()


def _answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
