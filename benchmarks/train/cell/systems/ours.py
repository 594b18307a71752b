"""Trains with memascend. It offloads the model and the optimizer."""

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
    """Imports the libraries that a user of this system imports; returns them."""
    importlib.import_module("memascend.session.offload")
    return [*in_ram.ready(), sys.modules["memascend"]]


def begin(work: Workload, settings: dict[str, Any], storage: Path) -> Ours:
    """Makes the model and offloads it.

    `settings` may have these entries:

    - `smallest`: True means the smallest budget that works. Then `host_memory` is ignored.
    - `host_memory`: a budget. The text "1.5x" means 1.5 times the smallest budget that works.
    - `held`: the `percent` of `held_budget`, which replaces any other budget.
    - `lean`: True means that the model is made on "meta" and its values are made in the store. The model is then never
      in memory as a whole.
    - `weights`: a folder that has the values of `made()`. The model is made on "meta" and gets these values. True means
      a new folder, into which another process writes the values.
    - `turns`: True means that micro-batches are computed one after the other, not by layer.
    - `state`, `durability`, `activations`: options of `offload()`.
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
        # The first loss scale of memascend is always 2^16.
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
    """Returns the checkpoint folder that `settings["weights"]` names.

    If it names no folder, writes a new checkpoint into `storage` and returns its folder.
    """
    if isinstance(settings.get("weights"), str):
        return Path(settings["weights"])
    folder = storage / "values"
    write(work, folder)
    return folder


def write(work: Workload, folder: Path) -> None:
    """Writes the values of `made()` to a checkpoint folder.

    A new process writes them, so that this process never has the model in memory.

    Raises:
        SystemExit: the new process failed.
    """
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=(work, folder))
    writer.start()
    writer.join()
    if writer.exitcode:
        raise SystemExit(
            f"could not write the model's values to {folder}: see the error above; if there is none, the kernel may "
            "have killed the writing process for lack of memory"
        )


def _write(work: Workload, folder: Path) -> None:
    made(work).save_pretrained(folder)


def smallest_budget(model: Any, optimizer: Any, options: dict[str, Any]) -> int:
    """Returns the smallest `host_memory` with which `offload()` works with these options.

    Does not offload the model.
    """
    from memascend.errors import BudgetError
    from memascend.session.offload import offload

    try:
        offload(model, optimizer, **{**options, "host_memory": 1})
    except BudgetError as error:
        smallest: int = error.smallest
        return smallest
    raise AssertionError("offload() accepted a budget of one byte")


def held_budget(model: Any, optimizer: Any, options: dict[str, Any], percent: int) -> int:
    """Returns the `host_memory` that keeps about `percent` % of the parameters in RAM. Does not offload the model.

    This is the default budget plus `percent` % of the memory that keeps all records in RAM.
    """
    from memascend.plan.options import Options
    from memascend.session.decide import planned

    plan = planned(model, optimizer, Options(**{**options, "host_memory": None})).plan
    return plan.comfortable + (plan.all_in_ram - plan.comfortable) * percent // 100


class Ours:
    """Trains an offloaded model with its offloaded optimizer."""

    def __init__(self, model: Any, optimizer: OffloadedOptimizer, *, scaled: bool, by_layer: bool) -> None:
        self.model, self.optimizer, self.scaled, self.by_layer = model, optimizer, scaled, by_layer

    def forward(self, tokens: Any) -> Any:
        """Returns the loss of a batch."""
        return self.model(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: Any) -> None:
        """Computes the gradients of a loss. In fp16, `optimizer.backward` multiplies the loss by the loss scale."""
        if self.scaled:
            self.optimizer.backward(loss)
        else:
            loss.backward()

    def accumulate(self, batches: list[Any]) -> Any:
        """Computes the gradients of all micro-batches of a step; returns their mean loss."""
        if not self.by_layer:
            return in_ram.one_after_the_other(self, batches)
        losses = self.optimizer.accumulate(self.forward, batches, scale=1 / len(batches), by_layer=True)
        return sum(losses) / len(batches)

    def update(self) -> None:
        """Updates the parameters, commits the step, and drops the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counted(self) -> int | None:
        """Returns the bytes moved so far, from the optimizer's report."""
        return moved(self.optimizer)

    def way(self) -> str:
        """Returns the part of the next step that writes deferred updates, as the function `way` does."""
        return way(self.optimizer)

    def end(self) -> dict[str, Any]:
        """Closes the optimizer; returns its report and its plan."""
        return ended(self.optimizer)


def moved(optimizer: OffloadedOptimizer) -> int:
    """Returns the bytes that an optimizer has read and written so far, from its report."""
    report = optimizer.report().to_dict()
    return int(sum(report["read"].values()) + sum(report["written"].values()))


def way(optimizer: OffloadedOptimizer) -> str:
    """Returns the part of the next step that writes deferred updates; "" if no step has deferred updates yet.

    The part is "forward" or "backward".
    """
    return str(optimizer.report().to_dict().get("deferred", {}).get("to", ""))


def ended(optimizer: OffloadedOptimizer) -> dict[str, Any]:
    """Closes an optimizer; returns its report, and the memory and the bytes of a step from its plan.

    "in_turn_since" has the reasons for which `accumulate()` computed micro-batches one after the other.
    """
    plan = optimizer.plan
    output = {
        "in_turn_since": sorted(optimizer._session.accumulation._logged),  # noqa: SLF001 - users read it in the log
        "report": optimizer.report().to_dict(),
        "plan": {
            "host_peak": plan.host_peak,
            "host": plan.host,
            "read": plan.read_bytes,
            "written": plan.written_bytes,
        },
    }
    optimizer.close()
    return output
