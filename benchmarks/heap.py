"""Measures seconds of a step and memory with other thresholds from which on the C library maps allocations.

Each model trains in a process of its own for each threshold; the processes take turns, so that all of them meet the
same machine. "ours" is what users get (`rust/mem/src/heap.rs`), "none" leaves the heap alone
(`MEMASCEND_MALLOC=system`); a number is given to glibc by its own variables from the beginning, so that the model is
not made in the heap. What is printed: the median seconds of a step, and the most that the process
held while it trained beyond what it held before there was a model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.depth import status
from memascend.text import table

_KIB, _MIB = 1 << 10, 1 << 20
_THRESHOLDS = {"ours": None, "none": None, "32K": 32 * _KIB, "1M": _MIB, "4M": 4 * _MIB, "32M": 32 * _MIB}
# Hidden, intermediate, blocks, heads, heads of keys, words; those of Qwen2 where it has that size.
_SHAPES = {"125M": (768, 2048, 12, 12, 4, 32_000), "1.5B": (1536, 8960, 28, 12, 2, 151_936)}
_WARM_STEPS = 2


def main() -> None:
    """Measure every model with every threshold, and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", nargs="+", choices=_SHAPES, default=["125M"])
    parser.add_argument("--thresholds", nargs="+", choices=_THRESHOLDS, default=list(_THRESHOLDS))
    parser.add_argument("--tokens", type=int, default=128, help="of one sequence (%(default)s)")
    parser.add_argument("--gradients", choices=("auto", "fused", "ssd", "ram"), default="fused")
    parser.add_argument("--host-memory", help="a budget, for what is held (default: offload()'s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each process")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn that count")
    parser.add_argument("--storage", default=".", help="a folder on the disk to train from")
    parser.add_argument("--json", action="store_true", help="print values instead of tables")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(_train(**json.loads(options.work))))
        return
    found: dict[str, dict[str, Any]] = {}
    for shape in options.parameters:
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in options.thresholds}
        for _ in range(options.rounds):
            for name, made in turns.items():
                made.append(_measured(options, shape, name))
        found[shape] = {name: _summary(made) for name, made in turns.items()}
        if not options.json:
            print(f"{shape}, 1 x {options.tokens} tokens, gradients {options.gradients}\n")
            rows = [(name, f"{one['seconds']:.3f}", f"{one['added'] / 1e6:,.0f}") for name, one in found[shape].items()]
            print(table(("mapped from", "seconds a step", "MB added"), rows), flush=True)
    if options.json:
        print(json.dumps(found, indent=2))


def _measured(options: argparse.Namespace, shape: str, name: str) -> dict[str, Any]:
    """What a process of its own says."""
    threshold = _THRESHOLDS[name]
    of_glibc = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "MEMASCEND_MALLOC")
    environment = {name: value for name, value in os.environ.items() if name not in of_glibc}
    if name == "none":
        environment["MEMASCEND_MALLOC"] = "system"
    elif threshold is not None:
        environment |= {of_glibc[0]: str(threshold), of_glibc[1]: str(2 * threshold)}
    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-heap-") as folder:
        work = {"shape": shape, "folder": folder, "tokens": options.tokens, "steps": options.steps}
        work["options"] = {"gradients": options.gradients, "host_memory": options.host_memory}
        words = [sys.executable, "-m", "benchmarks.heap", "--work", json.dumps(work)]
        done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def _summary(made: list[dict[str, Any]]) -> dict[str, float]:
    seconds = [took for one in made for took in one["seconds"]]
    return {"seconds": statistics.median(seconds), "added": statistics.median(one["added"] for one in made)}


def _train(shape: str, folder: str, tokens: int, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each step, and what training added to the process at its peak."""
    import torch
    import transformers

    import memascend

    torch.manual_seed(0)
    before = status("RssAnon")
    hidden, intermediate, blocks, heads, keys, words = _SHAPES[shape]
    config = transformers.Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=words,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model: Any = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = memascend.offload(model, optimizer, storage=f"{folder}/store", device="cpu", **options)
    # What making the model took is no part of training.
    Path("/proc/self/clear_refs").write_text("5")
    batch = torch.randint(0, words, (1, tokens))
    seconds = []
    with optimizer:
        for _ in range(_WARM_STEPS + steps):
            began = time.perf_counter()
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        # The pages of files are no memory that training takes: what is mapped of them now is left out.
        added = status("VmHWM") - status("RssFile") - status("RssShmem") - before
    return {"seconds": seconds[_WARM_STEPS:], "added": added}


if __name__ == "__main__":
    main()
