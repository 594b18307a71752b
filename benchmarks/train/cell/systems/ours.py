"""Trains with memascend: model and optimizer offloaded."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.train.cell.systems import in_ram
from benchmarks.train.cell.workload import LEARNING_RATE, LOSS_SCALE_POWER, Workload, configuration, made, prepared

if TYPE_CHECKING:
    from types import ModuleType

    from memascend.session.optimizer import OffloadedOptimizer

__all__ = ["Ours", "begin", "checkpoint", "ended", "held_budget", "moved", "ready", "smallest_budget", "way", "write"]


def ready() -> list[ModuleType]:
    """Import what a user imports."""
    importlib.import_module("memascend.session.offload")
    return [*in_ram.ready(), sys.modules["memascend"]]


def begin(work: Workload, settings: dict[str, Any], storage: Path) -> Ours:
    """The model in the store.

    Settings: `smallest`: the smallest budget that works; `host_memory`: a budget, or as `"1.5x"` a multiple of the
    smallest; `held`: a budget by the percentage of the parameters that are held; `lean`: the model is made on "meta"
    and its values in the store, so that it is never in memory as a whole; `weights`: likewise, with the values of
    `made()` from this folder, or (True) from one that another process writes; `turns`: micro-batches go one after the
    other, not by layer; `state`, `durability`, `activations`: as of `offload()`.
    """
    import torch
    import transformers

    from memascend.session.offload import offload

    if settings.get("lean") or settings.get("weights"):
        dtype = getattr(torch, work.dtype)
        with torch.device("meta"):
            model = prepared(work, transformers.Qwen2ForCausalLM(configuration(work)).to(dtype))
    else:
        model = made(work)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    options: dict[str, Any] = {"storage": storage / "memascend.store", "existing": "replace", "device": work.device}
    if settings.get("weights"):
        options["weights"] = checkpoint(work, settings, storage)
    if work.clip is not None:
        options["max_grad_norm"] = work.clip
    if work.dtype == "float16":
        # Where the dynamic scale begins is no option of ours; both begin at 2^16.
        assert LOSS_SCALE_POWER == 16
    options |= {name: settings[name] for name in ("state", "durability", "activations") if name in settings}
    budget = "1x" if settings.get("smallest") else settings.get("host_memory")
    if isinstance(budget, str) and budget.endswith("x"):
        budget = int(smallest_budget(model, optimizer, options) * float(budget.removesuffix("x")))
    if "held" in settings:
        budget = held_budget(model, optimizer, options, settings["held"])
    if budget is not None:
        options["host_memory"] = budget
    model, offloaded = offload(model, optimizer, **options)
    return Ours(model, offloaded, scaled=work.dtype == "float16", by_layer=not settings.get("turns"))


def checkpoint(work: Workload, settings: dict[str, Any], storage: Path) -> Path:
    """The folder of the model's values that settings name, or a new one."""
    if isinstance(settings.get("weights"), str):
        return Path(settings["weights"])
    folder = storage / "values"
    write(work, folder)
    return folder


def write(work: Workload, folder: Path) -> None:
    """The values of every system's model, as a folder of the hub has them: this process never holds them."""
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=(work, folder))
    writer.start()
    writer.join()
    if writer.exitcode:
        raise SystemExit(f"the values of the model could not be written into {folder}: see above")


def _write(work: Workload, folder: Path) -> None:
    made(work).save_pretrained(folder)


def smallest_budget(model: Any, optimizer: Any, options: dict[str, Any]) -> int:
    """The least `host_memory` with which these options of `offload()` work. Nothing is offloaded."""
    from memascend.errors import BudgetError
    from memascend.session.offload import offload

    try:
        offload(model, optimizer, **{**options, "host_memory": 1})
    except BudgetError as error:
        smallest: int = error.smallest
        return smallest
    raise AssertionError("a budget of one byte was taken")


def held_budget(model: Any, optimizer: Any, options: dict[str, Any], percent: int) -> int:
    """The `host_memory` that holds this part of all parameters. Nothing is offloaded."""
    from memascend.plan.options import Options
    from memascend.session.decide import planned

    plan = planned(model, optimizer, Options(**{**options, "host_memory": None})).plan
    return plan.comfortable + (plan.all_in_ram - plan.comfortable) * percent // 100


class Ours:
    """The usual loop, its optimizer offloaded."""

    def __init__(self, model: Any, optimizer: OffloadedOptimizer, *, scaled: bool, by_layer: bool) -> None:
        self.model, self.optimizer, self.scaled, self.by_layer = model, optimizer, scaled, by_layer

    def forward(self, tokens: Any) -> Any:
        """The loss of a batch."""
        return self.model(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: Any) -> None:
        """Gradients; a loss scale goes through the optimizer."""
        if self.scaled:
            self.optimizer.backward(loss)
        else:
            loss.backward()

    def accumulate(self, batches: list[Any]) -> Any:
        """The mean loss of the step's batches, with its gradients."""
        if not self.by_layer:
            return in_ram.one_after_the_other(self, batches)
        losses = self.optimizer.accumulate(self.forward, batches, scale=1 / len(batches), by_layer=True)
        return sum(losses) / len(batches)

    def update(self) -> None:
        """The step, committed."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counted(self) -> int | None:
        """By the report."""
        return moved(self.optimizer)

    def way(self) -> str:
        """By the report."""
        return way(self.optimizer)

    def end(self) -> dict[str, Any]:
        """Report and plan, and the store closed."""
        return ended(self.optimizer)


def moved(optimizer: OffloadedOptimizer) -> int:
    """Bytes that it has read and written, by its report."""
    report = optimizer.report().to_dict()
    return int(sum(report["read"].values()) + sum(report["written"].values()))


def way(optimizer: OffloadedOptimizer) -> str:
    """Where the next step writes the updates that the last one left; "": nowhere."""
    return str(optimizer.report().to_dict().get("deferred", {}).get("to", ""))


def ended(optimizer: OffloadedOptimizer) -> dict[str, Any]:
    """Its report, its plan, and why micro-batches went one after the other; it is closed."""
    plan = optimizer.plan
    said = {
        "in_turn_since": sorted(optimizer._session.accumulation._told),  # noqa: SLF001 - the log says it to users
        "report": optimizer.report().to_dict(),
        "plan": {
            "host_peak": plan.host_peak,
            "host": plan.host,
            "read": plan.read_bytes,
            "written": plan.written_bytes,
        },
    }
    optimizer.close()
    return said
