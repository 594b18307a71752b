"""Trains the largest model whose store fits on a disk, on a GPU; reports the time and the bytes of a step.

    python -m benchmarks.cuda --storage /mnt/nvme [--store 48GiB] [--card 24GiB] [--write benchmarks/results]
    python -m benchmarks.cuda --headline --storage /mnt/nvme [--write benchmarks/results]

The model has Qwen2's shape. Its store has 24 bytes for each parameter. The model is made on "meta", initialized at
random and trained in bfloat16, and the backward recomputes its blocks. Training in memory would hold 14 bytes for each
parameter. The host budget and the device budget are each a tenth of these bytes, or the smallest budget that works if a
tenth is too small.

The benchmark compares the time of a step with a bound. The bound is the time of a step whose computation, disk
transfers and PCIe transfers in both directions overlap without loss. All speeds that the bound uses are measured in the
same run.

`--device cpu` runs the same code without a GPU. `--headline` measures README's predictions in eight minutes: see
`benchmarks.headline`.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import memascend
from benchmarks import headline
from benchmarks.machine import described
from benchmarks.train.judge import bound
from memascend.cli import process
from memascend.cli.storage import speeds_at
from memascend.plan.options import parse_bytes
from memascend.text import bytes_shown, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The bytes of a store for each parameter. A store has two slots. Each slot has the parameter's value, the rest of its
# fp32 master weight, and its two moments.
STORE_BYTES = 24
# The bytes that training in memory holds for each parameter: value, fp32 master weight and two moments, but no
# gradient.
STATE_BYTES = 14
# Each budget is the bytes of the training state divided by `SHARE`.
SHARE = 10
# The fraction of the disk's free space that a run without --store leaves free.
_SPARED = 0.1
# The bytes of each copy that measures the speed of PCIe. The copies of a training step are many times smaller.
_COPY_BYTES = 256 << 20


# --- the model ---------------------------------------------------------------------------------


def shape(parameters: int, vocabulary: int = 32_768) -> Qwen2Config:
    """Returns the config of the largest model that has Qwen2's proportions and at most `parameters` parameters.

    The width of the model is 48 to 96 times the number of its blocks.
    """
    found: tuple[int, Qwen2Config] | None = None
    for width in range(64, 8192 + 1, 64):
        heads = width // 64
        groups = next(count for count in (8, 4, 2, 1) if heads % count == 0)
        inner = 11 * width // 4 // 64 * 64
        shared = width * groups // heads
        block = 2 * width * width + 2 * width * shared + 3 * width * inner + 4 * width + 2 * shared
        blocks = min((parameters - 2 * vocabulary * width - width) // block, width // 48)
        total = 2 * vocabulary * width + width + blocks * block
        if blocks >= max(2, width // 96) and (found is None or total > found[0]):
            made = Qwen2Config(
                vocab_size=vocabulary,
                hidden_size=width,
                intermediate_size=inner,
                num_hidden_layers=blocks,
                num_attention_heads=heads,
                num_key_value_heads=groups,
                max_position_embeddings=1 << 20,
                tie_word_embeddings=False,
                bos_token_id=0,
                eos_token_id=1,
            )
            found = total, made
    if found is None:
        raise SystemExit(
            f"all models of this shape have more than {parameters} parameters: pass a larger --store, or a --storage "
            "folder with more free space"
        )
    return found[1]


def recomputed(model: Any) -> None:
    """Turns on activation checkpointing: the backward recomputes the model's blocks.

    Old versions of transformers have only `gradient_checkpointing_enable`.
    """
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()


def bodiless(config: Qwen2Config) -> Any:
    """Returns the model on the device "meta", which stores no values. The backward recomputes the model's blocks."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    recomputed(model)
    return model.train()


def count_of(model: torch.nn.Module) -> int:
    """Returns the number of elements of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def tokens_of(config: Qwen2Config, batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Returns a batch of tokens. Each call returns the same tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, config.vocab_size, (batch, length), generator=generator).to(device)


# --- the run -------------------------------------------------------------------------------------


class Run:
    """An offloaded model, its optimizer and its budgets."""

    def __init__(self, config: Qwen2Config, storage: Path, device: torch.device) -> None:
        """Offloads the model with budgets of a tenth of its training state.

        A budget that is too small is raised to the smallest budget that works. `raised` has the raised budgets.
        """
        self.config, self.device = config, device
        self.model = bodiless(config)
        self.parameters = count_of(self.model)
        share = self.parameters * STATE_BYTES // SHARE
        self.budgets = {"host_memory": share}
        if device.type != "cpu":
            self.budgets["device_memory"] = share
        self.raised: dict[str, int] = {}
        self.baseline = process.resident()
        began = time.perf_counter()
        self.optimizer = self._offloaded(storage)
        self.offload_seconds = time.perf_counter() - began
        process.restart_peak()

    def _offloaded(self, storage: Path) -> Any:
        torch.manual_seed(0)
        while True:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
            try:
                self.model, offloaded = memascend.offload(
                    self.model, optimizer, storage=storage, gradients="fused", device=self.device, **self.budgets
                )
            except memascend.BudgetError as error:
                name = "device_memory" if "device_memory" in str(error) else "host_memory"
                if self.raised.get(name) == error.smallest:
                    raise
                self.budgets[name] = self.raised[name] = error.smallest
                continue
            return offloaded

    def step(self, tokens: torch.Tensor) -> dict[str, float]:
        """Makes a step; returns the seconds of the step and of its parts, and the loss."""
        at = [time.perf_counter()]
        loss = self.model(input_ids=tokens, labels=tokens).loss
        # The host queues work on the device without waiting. `item()` waits until the device has finished the forward,
        # so that the seconds of the forward are complete.
        value = loss.item()
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        at.append(time.perf_counter())
        parts = {"step": at[3] - at[0], "forward": at[1] - at[0], "backward": at[2] - at[1], "update": at[3] - at[2]}
        return {**parts, "loss": value}

    def longest(self, batch: int, limit: int) -> int:
        """Searches for the longest sequence up to `limit` whose forward and backward fit into the device's memory."""
        return longest(self._fits(batch), limit)

    def _fits(self, batch: int) -> Callable[[int], bool]:
        def fits(length: int) -> bool:
            try:
                tokens = tokens_of(self.config, batch, length, self.device)
                self.model(input_ids=tokens, labels=tokens).loss.backward()
            except torch.OutOfMemoryError:
                found = False
            else:
                found = True
            self.optimizer.zero_grad()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            return found

        return fits


def longest(fits: Callable[[int], bool], limit: int) -> int:
    """Searches for the longest length up to `limit` that fits; returns the last length that fitted.

    Returns 0 if the first length does not fit. The search doubles the length from 512 (or `limit`, if it is smaller)
    until a length does not fit. Then it adds one to seven eighths to the last length that fitted.
    """
    best = 0
    length = min(512, limit)
    while length <= limit and fits(length):
        best, length = length, length * 2
    doubled = best
    for part in range(1, 8):
        between = doubled + doubled * part // 8
        if not doubled or between > limit or not fits(between):
            break
        best = between
    return best


# --- the bound -----------------------------------------------------------------------------------


def _timed(work: Callable[[], object], device: torch.device, rounds: int = 3) -> float:
    samples = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - began)
    return statistics.median(samples[1:])


def compute(config: Qwen2Config, tokens: torch.Tensor, device: torch.device) -> dict[str, float]:
    """Returns the seconds of a forward and of a backward without I/O.

    Measures two small models, one with one block and one with two blocks. Each small model fits on the device as a
    whole. Computes the seconds of all blocks from the two measurements.
    """
    found = []
    for blocks in (1, 2):
        torch.manual_seed(0)
        few = Qwen2Config.from_dict({**config.to_dict(), "num_hidden_layers": blocks, "layer_types": None})
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(few, dtype=torch.bfloat16).train()
        recomputed(model)

        def forward(model: Any = model) -> Any:
            return model(input_ids=tokens, labels=tokens).loss

        def both(model: Any = model, forward: Callable[[], Any] = forward) -> None:
            forward().backward()
            model.zero_grad()

        ahead = _timed(forward, device)
        found.append({"forward": ahead, "backward": max(0.0, _timed(both, device) - ahead)})
        del model
    one, two = found
    more = config.num_hidden_layers - 1
    return {part: one[part] + more * max(0.0, two[part] - one[part]) for part in one}


def pcie(device: torch.device) -> dict[str, float]:
    """Returns GB/s of copies from pinned memory to the device ("in") and back ("out"); an empty dict on the CPU."""
    if device.type == "cpu":
        return {}
    ring = memascend.memory.ChunkRing(_COPY_BYTES, 1)
    here = ring.lease().tensor(_COPY_BYTES, torch.uint8)
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    seconds = {
        "in": _timed(lambda: there.copy_(here, non_blocking=True), device),
        "out": _timed(lambda: here.copy_(there, non_blocking=True), device),
    }
    ring.close()
    return {way: _COPY_BYTES / taken / 1e9 for way, taken in seconds.items()}


def bounds(plan: Any, seconds: dict[str, float], disk: dict[str, float], bus: dict[str, float]) -> dict[str, float]:
    """Returns the seconds that a step needs for computation, for the disk and for PCIe.

    "step" has the seconds of a step in which all three overlap without loss.
    """
    nothing = dict.fromkeys(seconds, 0.0)
    found = {
        "compute": sum(seconds.values()),
        "disk": bound(nothing, plan.read_bytes, plan.written_bytes, disk)["step"],
        "step": bound(seconds, plan.read_bytes, plan.written_bytes, disk)["step"],
    }
    if bus:
        ahead = plan.read_bytes.get("values, forward", 0) / bus["in"] / 1e9
        # PCIe carries both directions at the same time. In the backward, values go to the device and gradients go to
        # the host. This code counts "values" of `written_bytes`, the trained values that a step writes to storage,
        # because the gradients have the same number of bytes.
        back = max(
            plan.read_bytes.get("values, backward", 0) / bus["in"], plan.written_bytes.get("values", 0) / bus["out"]
        )
        found["PCIe"] = ahead + back / 1e9
        slower = {"forward": max(seconds["forward"], ahead), "backward": max(seconds["backward"], back / 1e9)}
        found["step"] = bound(slower, plan.read_bytes, plan.written_bytes, disk)["step"]
    return found


# --- measuring and printing ------------------------------------------------------------------------


def bandwidth(path: Path) -> dict[str, float]:
    """Returns the GB/s of the disk that has `path`, for each access pattern."""
    return {pattern: speed.gb_per_second for pattern, speed in speeds_at(path).items()}


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Makes one run; returns all measurements of the run."""
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if options.card:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, parse_bytes(options.card, "--card") / total), device)
    free = shutil.disk_usage(folder).free
    store = parse_bytes(options.store, "--store") if options.store else int(free * (1 - _SPARED))
    config = shape(store // STORE_BYTES, options.vocabulary)
    tokens = tokens_of(config, options.batch, options.length, device)
    disk = bandwidth(folder)
    bus = pcie(device)
    seconds = compute(config, tokens, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    run = Run(config, folder / "run.store", device)
    with run.optimizer:
        warm = run.step(tokens)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = run.optimizer.report().to_dict()
        steps = [run.step(tokens) for _ in range(options.steps)]
        report = run.optimizer.report().to_dict()
        peak = process.resident_peak()
        limits = bounds(run.optimizer.plan, seconds, disk, bus)
        step = statistics.median(one["step"] for one in steps)
        moved = sum(sum(report[way].values()) - sum(before[way].values()) for way in ("read", "written"))
        values = {
            "machine": {**described(), "device": _named(device)},
            "parameters": run.parameters,
            "shape": {"width": config.hidden_size, "blocks": config.num_hidden_layers},
            "tokens": f"{options.batch}x{options.length}",
            "state_bytes": run.parameters * STATE_BYTES,
            "store_bytes": run.optimizer.plan.disk_bytes,
            "budgets": run.budgets,
            "raised_to_the_smallest": run.raised,
            "offload_seconds": run.offload_seconds,
            "steps": [warm, *steps],
            "seconds": {part: statistics.median(one[part] for one in steps) for part in steps[0] if part != "loss"},
            "gb_per_second": {**disk, **{f"PCIe, {way}": speed for way, speed in bus.items()}},
            "compute_seconds": seconds,
            "bound": limits,
            "of_bound": step / limits["step"],
            "moved_per_parameter": moved / options.steps / run.parameters,
            "host": {**report["host"], "process_peak": peak, "process_before": run.baseline},
            "report": report,
        }
        if options.longest:
            values["longest_context"] = run.longest(options.batch, options.longest)
    return values


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "none"


def shown(values: dict[str, Any]) -> str:
    """Returns the measurements as a table."""
    report, seconds, limits = values["report"], values["seconds"], values["bound"]
    share = values["state_bytes"]
    rows = [
        ("parameters", f"{values['parameters']:,}", f"{values['shape']}, {values['tokens']} tokens"),
        ("training state", bytes_shown(share), "in memory: 14 bytes for each"),
        ("store", bytes_shown(values["store_bytes"]), ""),
        ("host, planned", bytes_shown(report["host"]["peak"]), f"{report['host']['peak'] / share:.3f} of the state"),
        (
            "host, process",
            bytes_shown(values["host"]["process_peak"]),
            f"{bytes_shown(values['host']['process_before'])} of it imports and the context",
        ),
    ]
    if "device" in report:
        there = report["device"]
        rows += [
            ("device, planned", bytes_shown(there["peak"]), f"{there['peak'] / share:.3f} of the state"),
            ("device, all of torch", bytes_shown(there["torch"]["peak"]), "with activations and logits"),
        ]
    rows += [
        ("a step", f"{seconds['step']:.3f} s", f"{values['of_bound']:.2f} times its bound"),
        *((f"  {part}", f"{seconds[part]:.3f} s", "") for part in ("forward", "backward", "update")),
        *(
            (f"bound: {name}", f"{taken:.3f} s", f"{taken / seconds['step']:.2f} of it")
            for name, taken in limits.items()
        ),
        ("moved in a step", f"{values['moved_per_parameter']:.2f}", "bytes for each parameter"),
    ]
    rows += [(f"GB/s, {name}", f"{speed:.2f}", "") for name, speed in values["gb_per_second"].items()]
    if "longest_context" in values:
        rows.append(("longest context", f"{values['longest_context']:,}", "tokens"))
    if values["raised_to_the_smallest"]:
        rows.append(("raised to the smallest", ", ".join(values["raised_to_the_smallest"]), "a tenth was too little"))
    about = "\n".join(f"{name}: {value}" for name, value in values["machine"].items())
    return f"{about}\n\n{table(('what', 'measured', 'note'), rows)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures a run and prints the results. Also writes the results to the folder of --write.

    With `--headline`, runs `benchmarks.headline` instead. Returns 1 if `--device` is "cuda" but torch finds no CUDA
    device.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=Path, default=Path(), help="a folder on the disk to use")
    parser.add_argument("--store", metavar="B", help="size of the store; default: nine tenths of free space")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--card", metavar="B", help="bytes of the device that torch may use, as on a smaller card")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, help="tokens of a sequence (2048; with --headline 1024)")
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after one warm-up step")
    parser.add_argument(
        "--longest", type=int, default=0, metavar="N", help="also find the longest context, up to N tokens"
    )
    parser.add_argument("--json", action="store_true", help="print values instead of the table")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FOLDER",
        help="also write cuda.txt and .json (with --headline: headline.txt and .json) there",
    )
    headline.add_arguments(parser.add_argument_group("with --headline, in 60 GB of disk").add_argument)
    options = parser.parse_args(arguments)
    options.length = options.length or (1024 if options.headline else 2048)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        print(
            "torch finds no CUDA device to measure: pass --device cpu to try this program on the CPU", file=sys.stderr
        )
        return 1
    if options.headline:
        return headline.run(options)
    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-cuda-") as name:
        values = measured(options, Path(name))
    text = shown(values)
    print(json.dumps(values, indent=1) if options.json else text)
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        (options.write / "cuda.json").write_text(json.dumps(values, indent=1) + "\n")
        (options.write / "cuda.txt").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
