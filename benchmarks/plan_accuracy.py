"""Compares the predictions of `memascend plan` with real runs on this machine: `python -m benchmarks.plan_accuracy`.

A cell is a model and a budget. In each round, a first process measures the processor and the disk, and plans the cell.
With `--memory`, it only plans. Then a second process runs the cell. The seconds in the table are medians of all rounds;
the memory is that of the last round.

The table has predicted and real figures: the memory of the process, the memory that training adds to the memory of
imported modules, and the seconds of a step. A round takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.train.cell.workload import WORKLOADS, configuration
from memascend.plan.spare import IMPORTS
from memascend.text import bytes_shown, seconds_shown, table

# The budgets to measure, as multiples of the comfortable budget. With three times the comfortable budget, memascend
# keeps records in RAM.
BUDGETS = (1.0, 3.0)


@dataclass(frozen=True)
class Case:
    """A model, the number of tokens in a step, and the budgets to measure."""

    shape: dict[str, Any]  # the fields of the model's config
    tokens: int = 512  # number of tokens in a step
    budgets: tuple[float, ...] = BUDGETS  # multiples of the comfortable budget


def _as_trained(name: str, budgets: tuple[float, ...] = BUDGETS) -> Case:
    """Returns the case for a workload of `benchmarks.train`. docs/measurements.md has the workload's measurements."""
    work = WORKLOADS[name]
    shape = {**configuration(work).to_diff_dict(), "architectures": ["Qwen2ForCausalLM"]}
    return Case(shape, work.length, budgets)


MODELS = {
    "25 M, Qwen2": Case({
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 384,
        "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 16_000,
    }),
    "50 M, GPT-2": Case({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 512, "n_layer": 12,
        "n_head": 8, "vocab_size": 16_000, "n_positions": 512,
    }),
    "125 M, Llama": Case({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 768,
        "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "vocab_size": 32_000,
    }),
    "125 M, Qwen2": _as_trained("125M-1x128"),
    "504 M, Qwen2": _as_trained("500M-1x128"),
    "1.5 B, Qwen2": _as_trained("1.5B-1x128", (1.0,)),
}  # fmt: skip
WARM, STEPS = 2, 5


def main() -> None:
    """Plans and runs every cell and prints the table. With `--run`, runs one cell in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=Path, default=Path(), help="a folder on the disk (default: here)")
    parser.add_argument("--tokens", type=int, help="tokens in a step of every model (default: the model's number)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the models (%(default)s)"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds of plan and run; use more if other programs run on this machine"
    )
    parser.add_argument("--memory", action="store_true", help="compare only memory, which other programs do not change")
    parser.add_argument("--write", type=Path, help="a folder for plan_accuracy.txt and .json")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(json.loads(options.run))))
        return
    cells = [cell for name in options.models for cell in measured(name, options)]
    text = shown(cells)
    print(text)
    if options.write:
        (options.write / "plan_accuracy.txt").write_text(text + "\n")
        (options.write / "plan_accuracy.json").write_text(json.dumps(cells, indent=2) + "\n")


def measured(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Plans and runs all cells of one model; returns their predictions and measurements."""
    case = MODELS[name]
    tokens = options.tokens or case.tokens
    with tempfile.TemporaryDirectory(dir=options.storage, prefix="memascend-bench-") as folder:
        config = Path(folder) / "config.json"
        shape = {"dtype": options.dtype, "tie_word_embeddings": False, "max_position_embeddings": 4096, **case.shape}
        config.write_text(json.dumps(shape))
        comfortable = planned(config, tokens, [])["plan"]["comfortable"]
        cells = []
        for factor in case.budgets:
            budget = int(comfortable * factor)
            speeds = [] if options.memory else ["--storage", folder]
            order = {"config": str(config), "tokens": tokens, "budget": budget, "storage": folder}
            rounds = []
            for _ in range(options.rounds):
                output = planned(config, tokens, [*speeds, "--host-memory", str(budget)])
                was = child(["-m", "benchmarks.plan_accuracy", "--run", json.dumps(order)])
                rounds.append((output["step"]["seconds_per_step"], was["seconds"]))
            print(f"{name}, {bytes_shown(budget)}: done", file=sys.stderr, flush=True)
            cells.append({
                "model": name, "parameters": output["model"]["parameters"], "budget": budget, "tokens": tokens,
                "dtype": options.dtype, "said_bytes": output["host_bytes"], "was_bytes": was["bytes"],
                # "said_added_bytes" subtracts the bytes that the plan assumes for imported modules, and
                # "was_added_bytes" subtracts the bytes that the run measured for them.
                "said_added_bytes": output["host_bytes"] - IMPORTS, "was_added_bytes": was["added_bytes"],
                "said_seconds": None if options.memory else statistics.median(output for output, _ in rounds),
                "was_seconds": statistics.median(was for _, was in rounds), "rounds": rounds,
                "bound": output["step"]["bound"], "gb_per_second": output["gb_per_second"],
            })  # fmt: skip
    return cells


def planned(config: Path, tokens: int, more: list[str]) -> dict[str, Any]:
    """Returns the JSON answer of `memascend plan`. If `more` has `--storage`, asks `benchmarks.processor` instead."""
    command = ["benchmarks.processor"] if "--storage" in more else ["memascend", "plan"]
    return child(["-m", *command, str(config), "--tokens", str(tokens), "--length", str(min(tokens, 512)),
                  "--keep-activations", "--loss", "full", "--gradients", "fused", *more, "--json"])  # fmt: skip


def child(words: list[str]) -> dict[str, Any]:
    """Runs Python with the arguments `words`; returns the JSON that it prints.

    If Python fails, this process exits with Python's error output.
    """
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Trains some steps; returns the median seconds of a step and the memory peak.

    "added_bytes" is the part of the peak that exceeds the memory after the imports.
    """
    import torch
    import transformers

    import memascend
    from memascend.cli import process

    config = transformers.AutoConfig.from_pretrained(order["config"])
    config.use_cache = False
    tokens = torch.arange(order["tokens"]).view(-1, min(order["tokens"], 512)) % config.vocab_size
    # This product starts torch's threads and loads torch's libraries. The memory that they take does not depend on the
    # model.
    (torch.rand(64, 64, requires_grad=True) @ torch.rand(64, 64)).sum().backward()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    # At this line, transformers has imported all modules that the model needs.
    before = process.resident()
    model, optimizer = memascend.offload(
        model.train(), torch.optim.AdamW(model.parameters()), storage=order["storage"], existing="replace",
        host_memory=order["budget"], gradients="fused", device="cpu",
    )  # fmt: skip
    seconds = []
    with optimizer:
        for index in range(WARM + STEPS):
            if index == WARM:
                process.restart_peak()
            began = time.perf_counter()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        peak = process.resident_peak()
        return {"seconds": statistics.median(seconds[WARM:]), "bytes": peak, "added_bytes": peak - before}


def shown(cells: list[dict[str, Any]]) -> str:
    """Returns the table."""
    head = (
        "model", "tokens", "budget", "process, predicted", "real", "ratio", "training adds, predicted", "real",
        "ratio", "step, predicted", "real", "ratio", "bound by",
    )  # fmt: skip
    rows = [
        (
            cell["model"], str(cell["tokens"]), bytes_shown(cell["budget"]),
            *_memory(cell["said_bytes"], cell["was_bytes"]),
            *_memory(cell["said_added_bytes"], cell["was_added_bytes"]),
            *_seconds(cell), cell["bound"] or "",
        )
        for cell in cells
    ]  # fmt: skip
    return table(head, rows)


def _memory(output: int, was: int) -> tuple[str, str, str]:
    return bytes_shown(output), bytes_shown(was), f"{output / was:.2f}"


def _seconds(cell: dict[str, Any]) -> tuple[str, str, str]:
    """Returns the predicted seconds, the real seconds and their ratio.

    With `--memory`, no seconds are predicted, and all three texts are empty.
    """
    output, was = cell["said_seconds"], cell["was_seconds"]
    if output is None:
        return "", "", ""
    return seconds_shown(output), seconds_shown(was), f"{output / was:.2f}"


if __name__ == "__main__":
    main()
