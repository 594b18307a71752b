"""Trains a small language model with several formats for the moments of AdamW, and compares the final losses.

Each run is a separate process on one thread, in RAM. The formats are fp32, bf16, 8bit, and bitsandbytes' AdamW8bit. A
fifth format shows what goes wrong if bf16 rounds the second moment to nearest. The tests in `tests/parity` check that
offloaded runs are bit-identical to runs in RAM.

A run that has a file in the results is not repeated. Remove its file to repeat the run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAYERS, WIDTH, ROWS, LENGTH = 3, 384, 1, 64
STEPS, WARM, LR, DECAY = 2_000, 100, 1e-3, 0.1
FORMATS = {
    "fp32": "32 bits, as torch has them",
    "bf16": "bf16, second moment rounded stochastically",
    "8bit": "8 bits",
    "bitsandbytes": "bitsandbytes.optim.AdamW8bit in RAM",
    "nearest": "warning: bf16, second moment rounded to nearest",
}
SEEDS = (0, 1, 2)
_EVERY = 20
# The fraction of the text that is not used for training.
_KEPT = 1 / 16


def main() -> None:
    """Makes the missing runs unless `--show` is given, then draws the picture and the table.

    With `--one`, makes one run and draws nothing.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "state_formats")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument(
        "--python", default=sys.executable, help="an interpreter that has bitsandbytes, for the runs with it"
    )
    parser.add_argument("--show", action="store_true", help="train nothing; draw the picture and table of earlier runs")
    parser.add_argument("--one", nargs=2, metavar=("FORMAT", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    if options.one:
        name, seed = options.one
        _write(_file(options.results, name, int(seed)), _run(name, int(seed)))
        return
    for seed in SEEDS if not options.show else ():
        for name in options.formats:
            if not _file(options.results, name, seed).exists():
                _start(options, name, seed)
    _show(options.results)


def _file(results: Path, name: str, seed: int) -> Path:
    return results / f"{name}-{seed}.json"


def _write(path: Path, value: Any) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value) + "\n")
    new.replace(path)


def _start(options: argparse.Namespace, name: str, seed: int) -> None:
    python = options.python if name == "bitsandbytes" else sys.executable
    command = [python, __file__, "--results", str(options.results), "--one", name, str(seed)]
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path})


def _run(name: str, seed: int) -> dict[str, Any]:
    """Trains one model; returns its losses, its final loss ("kept") on unseen text, and a checksum of its weights."""
    import torch

    from memascend.cli.demo.side import ByteModel, batch, read_text

    torch.set_num_threads(1)
    text = read_text()
    cut = int(len(text) * (1 - _KEPT))
    torch.manual_seed(seed)
    model = ByteModel(LAYERS, WIDTH, LENGTH)
    optimizers = _optimizers(model, name)
    losses, summed, begun = [], 0.0, time.process_time()
    for step in range(STEPS):
        rate = LR * min(1.0, (step + 1) / WARM) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss = _loss(model, batch(text[:cut], seed * 1_000_000 + step, ROWS, LENGTH))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        summed += loss.item()
        if (step + 1) % _EVERY == 0:
            losses.append(summed / _EVERY)
            summed = 0.0
    with torch.no_grad():
        kept = [_loss(model, batch(text[cut:], number, 16, LENGTH)).item() for number in range(16)]
    check = 0
    for parameter in model.parameters():
        check = zlib.crc32(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes(), check)
    return {
        "format": name,
        "seed": seed,
        "losses": losses,
        "kept": statistics.mean(kept),
        "weights": check,
        "cpu_seconds": time.process_time() - begun,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _loss(model: Any, tokens: Any) -> Any:
    """Returns the model's loss. Uses no activation checkpointing, because the batches have few tokens."""
    import torch

    hidden = model.bytes(tokens[:, :-1]) + model.places(torch.arange(tokens.shape[1] - 1))
    for block in model.blocks:
        hidden = block(hidden)
    logits = model.head(model.norm(hidden))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _optimizers(model: Any, name: str) -> list[Any]:
    """Returns the optimizers of a format.

    Each of the two 8-bit formats needs two optimizers: one for embeddings and parameters of fewer than 4,096 elements,
    whose moments stay in fp32, and one for the other parameters.
    """
    import torch
    from support.moments import MomentsInRam, exact_root

    embeddings = {id(model.bytes.weight), id(model.places.weight)}
    kept = [p for p in model.parameters() if p.numel() < 4096 or id(p) in embeddings]
    others = [p for p in model.parameters() if not any(p is other for other in kept)]
    numbers = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": DECAY}
    if name == "fp32":
        return [torch.optim.AdamW(model.parameters(), fused=True, **numbers)]
    names = {id(p): given for given, p in model.named_parameters()}
    if name == "bf16":
        return [_reduced({names[id(p)]: p for p in model.parameters()}, name, numbers)]
    if name == "nearest":
        # memascend has no kernel for this format, because the format is only a warning. So `MomentsInRam`, an optimizer
        # of the tests, makes the steps.
        groups, widths = [{"params": list(model.parameters()), **numbers}], dict.fromkeys(model.parameters(), "bf16")
        return [MomentsInRam(groups, widths=widths, keys={}, second=name)]
    plain = torch.optim.AdamW(kept, fused=True, **numbers)
    if name == "8bit":
        return [plain, _reduced({names[id(p)]: p for p in others}, name, numbers)]
    import bitsandbytes

    # bitsandbytes calls `torch.Tensor.sqrt`, which may use a library whose results are wrong in the last bit.
    # memascend's square roots are correct in the last bit, so `exact_root` replaces torch's function.
    torch.Tensor.sqrt = exact_root  # type: ignore[method-assign, assignment]
    return [plain, bitsandbytes.optim.AdamW8bit(others, **numbers)]


def _reduced(named: dict[str, Any], form: str, numbers: dict[str, Any]) -> Any:
    """Returns an optimizer in RAM. It updates the parameters `named` with memascend's kernel for the format `form`."""
    import torch

    from benchmarks.reduced import adamw_reduced, encoded

    class Reduced(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([{"params": list(named.values()), **numbers}], {})
            self.names = {parameter: name for name, parameter in named.items()}
            self.steps = 0

        @torch.no_grad()
        def step(self) -> None:
            self.steps += 1
            (group,) = self.param_groups
            options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            for parameter, name in self.names.items():
                state = self.state[parameter]
                if not state:
                    state.update(encoded(parameter.detach(), {}, form))
                adamw_reduced(
                    parameter.detach(), state, parameter.grad, form=form, name=name, step=self.steps, **options
                )

    return Reduced()


def _show(results: Path) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for name in FORMATS:
        files = [_file(results, name, seed) for seed in SEEDS]
        found[name] = [json.loads(file.read_text()) for file in files if file.exists()]
    what = f"{LAYERS} blocks of width {WIDTH}, {ROWS} x {LENGTH} bytes a step, {STEPS} steps, AdamW"
    lines = [
        f"{what}, lr {LR} falling to a tenth, weight decay {DECAY}.",
        "Loss of text that no step saw, at the end; one column a seed.",
        "",
        "| moments | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | mean |",
        "|---|" + "---|" * (len(SEEDS) + 1),
    ]
    for name, runs in found.items():
        ends = {run["seed"]: run["kept"] for run in runs}
        cells = [f"{ends[seed]:.4f}" if seed in ends else "" for seed in SEEDS]
        mean = f"{statistics.mean(ends.values()):.4f}" if ends else ""
        lines.append(f"| {FORMATS[name]} | {' | '.join(cells)} | {mean} |")
    pairs = [
        (one["weights"], other["weights"])
        for one in found["8bit"]
        for other in found["bitsandbytes"]
        if one["seed"] == other["seed"]
    ]
    if pairs:
        equal = sum(one == other for one, other in pairs)
        lines += ["", f"Weights of 8bit and of bitsandbytes at the end: the same bits in {equal} of {len(pairs)} runs."]
    text = "\n".join(lines) + "\n"
    print(text)
    results.with_suffix(".txt").write_text(text)
    _draw(found, results.with_suffix(".png"))


def _draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="black", linewidth=1, label=FORMATS["fp32"])
    wide = {run["seed"]: run["losses"] for run in found["fp32"]}
    for number, (name, runs) in enumerate(found.items()):
        # Subtracts the losses of fp32 with the same seed. A seed determines the batches of a run. Losses of two
        # different batches would differ by more than losses of two formats.
        apart = [_apart(run["losses"], wide[run["seed"]]) for run in runs if name != "fp32" and run["seed"] in wide]
        if not apart:
            continue
        steps = [(at + 1) * _EVERY for at in range(len(apart[0]))]
        style = {"color": f"C{number}", "linestyle": ":" if name == "bitsandbytes" else "-"}
        means = [statistics.mean(of_seeds) for of_seeds in zip(*apart, strict=True)]
        axes.plot(steps, means, linewidth=2, label=FORMATS[name], **style)
        for one in apart if name != "bitsandbytes" else ():
            axes.plot(steps, one, linewidth=0.5, alpha=0.6, **style)
    axes.set(xlabel="step", ylabel="loss beside 32 bits (mean of 100 steps)")
    axes.set_title("Loss with the moments in fewer bits: bold the mean of the seeds, thin each seed", fontsize=9)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=150)


def _apart(losses: list[float], wide: list[float]) -> list[float]:
    """Returns the differences of `losses` from `wide`, each averaged over the last 100 steps up to its place."""
    apart = [loss - other for loss, other in zip(losses, wide, strict=True)]
    return [statistics.mean(apart[max(0, at - 4) : at + 1]) for at in range(len(apart))]


if __name__ == "__main__":
    main()
