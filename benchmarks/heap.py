"""Measures the seconds and the memory of a step with several values of malloc's mmap threshold.

malloc puts an allocation of at least this size into a separate memory mapping, not into its heap. For each model and
each threshold, the benchmark trains in separate processes. The processes take turns, so that a change of the machine's
speed affects all thresholds.

"ours" is the default threshold of memascend (`rust/mem/src/heap.rs`). "none" does not change malloc's settings
(`MEMASCEND_MALLOC=system`). A size, such as "4M", is the threshold itself. The environment variables of glibc set this
threshold, so it already applies while the model is made. The table has the median seconds of a step, and the added
bytes: the memory peak of training, minus the memory of the process before the model was made.
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
# Hidden size, intermediate size, blocks, heads, key-value heads, vocabulary. "1.5B" has the shape of Qwen2-1.5B.
_SHAPES = {"125M": (768, 2048, 12, 12, 4, 32_000), "1.5B": (1536, 8960, 28, 12, 2, 151_936)}
_WARM_STEPS = 2


def main() -> None:
    """Measures every model with every threshold; prints a table for each model, or JSON.

    With `--work`, trains one model with one threshold in this process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", nargs="+", choices=_SHAPES, default=["125M"])
    parser.add_argument("--thresholds", nargs="+", choices=_THRESHOLDS, default=list(_THRESHOLDS))
    parser.add_argument("--tokens", type=int, default=128, help="tokens in the sequence (%(default)s)")
    parser.add_argument("--gradients", choices=("auto", "fused", "ssd", "ram"), default="fused")
    parser.add_argument("--host-memory", help="the budget (default: the default of offload())")
    parser.add_argument("--rounds", type=int, default=3, help="number of processes for each threshold")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a process")
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
    """Trains in a new process with the threshold `name`; returns the result of `_train`."""
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
    reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reply


def _summary(made: list[dict[str, Any]]) -> dict[str, float]:
    seconds = [took for one in made for took in one["seconds"]]
    return {"seconds": statistics.median(seconds), "added": statistics.median(one["added"] for one in made)}


def _train(shape: str, folder: str, tokens: int, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Trains a model; returns the seconds of each measured step, and "added".

    "added" is the largest number of bytes that the model and its training added to the memory of the process.
    """
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
    # Resets the memory peak of the process. The peak of training must not include the peak of making the model.
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
        # VmHWM includes mapped pages of files and shared memory. Training does not allocate these pages, so the pages
        # that are mapped now are subtracted.
        added = status("VmHWM") - status("RssFile") - status("RssShmem") - before
    return {"seconds": seconds[_WARM_STEPS:], "added": added}


if __name__ == "__main__":
    main()
