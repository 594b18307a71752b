"""`memascend plan`: shows the plan and cost of a run for a model that need not be downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.cli.plan.costs import Costs, cost
from memascend.cli.show import bytes_shown, seconds_shown, table
from memascend.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    import torch

    from memascend.cli.plan.sources import DescribedModel
    from memascend.run.decision import Planned

_TYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
          "float16": "float16", "fp16": "float16"}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; those that `offload()` has mean the same here."""
    parser.add_argument(
        "model", metavar="CONFIG|FOLDER", type=Path, help="config.json of a Hugging Face model, or safetensors"
    )
    parser.add_argument("--host-memory", metavar="B", help='the budget, as "32GiB"; default: the smallest that is fast')
    parser.add_argument("--device", metavar="D", help="where the model would compute, as cuda; it need not be there")
    parser.add_argument("--device-memory", metavar="B", help="the budget there; default: the smallest that is fast")
    parser.add_argument(
        "--storage",
        metavar="P",
        action="append",
        help="where the store would lie; several: given again. It is measured",
    )
    parser.add_argument("--gradients", choices=("auto", "fused", "ssd", "ram"), default="auto")
    parser.add_argument("--max-grad-norm", metavar="N", type=float, help="clip the global norm")
    parser.add_argument("--accumulation-steps", metavar="N", type=int, default=1, help="backwards that make one step")
    parser.add_argument("--optimizer", metavar="NAME", default="AdamW", help="a class of torch.optim (%(default)s)")
    parser.add_argument("--dtype", choices=_TYPES, help="of the parameters; default: as the model says, else bfloat16")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", metavar="PNG", type=Path, help="draw host memory and storage into this file")


def run(options: argparse.Namespace) -> int:
    """Print the plan; 1 where the store would not fit the storage that is named."""
    import torch

    from memascend.cli.plan.sources import describe
    from memascend.planning.options import Options
    from memascend.run.decision import planned

    source = describe(options.model, None if options.dtype is None else getattr(torch, _TYPES[options.dtype]))
    asked = Options(
        storage=options.storage,
        host_memory=options.host_memory,
        device=options.device,
        device_memory=options.device_memory,
        gradients=options.gradients,
        max_grad_norm=options.max_grad_norm,
        accumulation_steps=options.accumulation_steps,
    )
    found = planned(source.model, _optimizer(options.optimizer, source.model), asked)
    costs = cost(source.model, found, [Path(path) for path in asked.paths or ()])
    if options.picture is not None:
        from memascend.cli.plan.picture import draw

        draw(options.picture, found.plan, costs)
    if options.json:
        print(json.dumps(_values(options, source, found, costs), indent=2))
    else:
        print(_text(options, source, found, costs))
    return int(not _fits(found, costs))


def _fits(found: Planned, costs: Costs) -> bool:
    """Whether there is room for the store, where storage was named."""
    return costs.free_bytes is None or costs.free_bytes >= found.plan.disk_bytes


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    import torch

    kinds: dict[str, Any] = {
        kind.lower(): getattr(torch.optim, kind)
        for kind in dir(torch.optim)
        if isinstance(getattr(torch.optim, kind), type) and kind != "Optimizer"
    }
    kind = kinds.get(name.lower())
    if kind is None or not issubclass(kind, torch.optim.Optimizer):
        raise ConfigError(f"--optimizer names a class of torch.optim, as AdamW or SGD, and not {name!r}")
    made: torch.optim.Optimizer = kind([one for one in model.parameters() if one.requires_grad])
    return made


def _values(options: argparse.Namespace, source: DescribedModel, found: Planned, costs: Costs) -> dict[str, Any]:
    return {
        "model": {"path": str(options.model), "described_by": source.by, "parameters": costs.parameters},
        "optimizer": options.optimizer,
        "plan": found.plan.to_dict(),
        "in_memory_bytes": costs.in_memory,
        "disk": {"bytes": found.plan.disk_bytes, "free_bytes": costs.free_bytes, "fits": _fits(found, costs)},
        "written_bytes_per_step": costs.written_bytes,
        "read_bytes_per_step": costs.read_bytes,
        "steps_per_100_tb_written": costs.steps_per_100_tb,
        "gb_per_second": costs.speeds or None,
        "disk_seconds_per_step": costs.seconds,
    }


def _text(options: argparse.Namespace, source: DescribedModel, found: Planned, costs: Costs) -> str:
    rows = [("host memory", bytes_shown(found.plan.host_peak), _fewer(costs.in_memory, found.plan.host_peak))]
    free = ""
    if costs.free_bytes is not None:
        enough = "" if _fits(found, costs) else ": not enough"
        free = f"{bytes_shown(costs.free_bytes)} are free{enough}"
    rows.append(("room on storage", bytes_shown(found.plan.disk_bytes), free))
    rows.append(
        ("written in a step", bytes_shown(costs.written_bytes), f"{costs.steps_per_100_tb:,} steps write 100 TB")
    )
    rows.append(("read in a step", bytes_shown(costs.read_bytes), ""))
    rows.append(("the disk's part of a step", *_bound(options, costs)))
    head = f"{options.model}: {costs.parameters:,} parameters, described by {source.by}; {options.optimizer}"
    return f"{head}\n\n{found.plan}\n\n{table(('what', 'how much', 'note'), rows)}"


def _fewer(in_memory: int, peak: int) -> str:
    return f"training in memory holds {bytes_shown(in_memory)} and activations, {in_memory / peak:.1f} times as much"


def _bound(options: argparse.Namespace, costs: Costs) -> tuple[str, str]:
    """How long the disk takes, and what that rests on."""
    if not options.storage:
        return "not measured", "--storage P measures the disk that holds P"
    if costs.seconds is None:
        return "not measured", "writing would overwrite what is on the device"
    speeds = ", ".join(f"{pattern} {speed:.2f} GB/s" for pattern, speed in costs.speeds.items())
    return seconds_shown(costs.seconds), f"measured: {speeds}; a step takes as long, or as its compute"
