"""Measures the host memory of training for models with more and more blocks, offloaded and in RAM.

Each model trains in a separate process. All models have Qwen2's shape, the same width and dtype, and activation
checkpointing. They are made in RAM, or on the device "meta". The process first trains a small model, which warms up
torch and transformers. The memory of the process after this warm-up is the baseline. The warm-up also changes malloc's
mmap threshold. The process then sets the threshold to 32 MiB, so that malloc allocates most of the large model in its
heap, as in a process without a warm-up.

The table has the peak of training, and the memory after the last step ("rest"), both without the baseline. Each block
keeps some bytes from the forward until the backward: the input of its checkpoint, and autograd's graph. A block keeps
the same bytes offloaded and in RAM. The runs in RAM measure these bytes. "flat" is the peak without these bytes.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.show import lines

_MIB = 1 << 20
_HIDDEN, _INTERMEDIATE, _VOCABULARY = 768, 2048, 32_000
# The value of M_MMAP_THRESHOLD in malloc.h.
_M_MMAP_THRESHOLD = -3
_LENGTH = 128
_STEPS = 3
# memascend promises that memory grows by at most this fraction from the first depth to the last depth.
_GROWS_MAX = 0.05
_COLUMNS = ("depth", "parameters", "case", "added_mib", "activations_mib", "flat_mib", "rest_mib", "planned_mib")


def main() -> None:
    """Measures every depth and prints a table. With `--write`, also writes a CSV file and a picture.

    With `--work`, trains one model in this process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", nargs="+", type=int, default=[4, 12, 24, 48])
    parser.add_argument("--cases", nargs="+", choices=("offloaded", "in RAM"), default=["offloaded", "in RAM"])
    parser.add_argument("--start", choices=("ram", "meta"), default="ram", help="where the model is made")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--width", type=int, default=_HIDDEN, help="width of a block (%(default)s)")
    parser.add_argument("--gradients", choices=("auto", "fused", "ssd"), default="fused")
    parser.add_argument("--storage", default=".", help="a folder on the disk to train from")
    parser.add_argument("--write", metavar="FOLDER", type=Path, help="also write depth.csv and depth.png there")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(_train(**json.loads(options.work))))
        return
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for depth in options.depths:
        for case in options.cases:
            with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-depth-") as folder:
                work = {"depth": depth, "case": case, "gradients": options.gradients, "folder": folder}
                # A model that trains in RAM needs its values, so it cannot be made on the device "meta".
                work |= {"start": options.start if case == "offloaded" else "ram"}
                work |= {"dtype": options.dtype, "width": options.width}
                words = [sys.executable, __file__, "--work", json.dumps(work)]
                done = subprocess.run(words, check=True, capture_output=True, text=True)
            found[depth, case] = json.loads(done.stdout.splitlines()[-1])
            print(f"{depth} blocks, {case}: {found[depth, case]['added'] / _MIB:.1f} MiB", flush=True)
    inputs = _LENGTH * options.width * (2 if options.dtype == "bfloat16" else 4)
    left = _left_by_block({depth: one["left"] for (depth, case), one in found.items() if case == "in RAM"}, inputs)
    rows = [_row(depth, case, one, left) for (depth, case), one in found.items()]
    print("\n".join("  ".join(f"{name} {row[name]}" for name in _COLUMNS) for row in rows))
    ours = [row for row in rows if row["case"] == "offloaded"]
    if len(ours) > 1:
        for when, column in (("at the peak", "flat_mib"), ("at rest", "rest_mib")):
            grows = ours[-1][column] / ours[0][column] - 1
            verdict = "within" if grows <= _GROWS_MAX else "beyond"
            depths = f"{ours[0]['depth']} to {ours[-1]['depth']} blocks"
            print(f"offloaded, {depths}, {when}: {grows:+.1%}, {verdict} {_GROWS_MAX:.0%}")
    if options.write:
        with (options.write / "depth.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        _draw(options.write / "depth.png", rows, options.width, options.dtype)


def _left_by_block(left: dict[int, int], inputs: int) -> float:
    """Returns the bytes that a forward leaves allocated for each block.

    Computes the bytes from the smallest and the largest depth that trained in RAM. If fewer than two depths trained in
    RAM, returns `inputs`, the bytes of one block's input.
    """
    if len(left) > 1:
        first, last = min(left), max(left)
        return max(0.0, (left[last] - left[first]) / (last - first))
    return float(inputs)


def _row(depth: int, case: str, found: dict[str, Any], left: float) -> dict[str, Any]:
    activations = depth * left
    return {
        "depth": depth,
        "parameters": found["parameters"],
        "case": case,
        "added_mib": round(found["added"] / _MIB, 1),
        "activations_mib": round(activations / _MIB, 1),
        "flat_mib": round((found["added"] - activations) / _MIB, 1),
        "rest_mib": round(found["rest"] / _MIB, 1),
        "planned_mib": round(found["planned"] / _MIB, 1) if found["planned"] else "",
    }


def _draw(path: Path, rows: list[dict[str, Any]], width: int, dtype: str) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        system = {"offloaded": "memascend", "in RAM": "torch"}.get(row["case"], row["case"])
        series.setdefault(system, []).append((float(row["depth"]), float(row["flat_mib"]) / 1024))
    title = f"Host memory that training adds, but for activations: {_LENGTH} tokens, {dtype}"
    lines(path, title, (f"blocks of width {width}", "GiB"), series)


# --- a training, in its own process ----------------------------------------------------------


def _train(depth: int, case: str, gradients: str, folder: str, start: str, dtype: str, width: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    for name in ("warm", "run"):
        Path(folder, name).mkdir()
    small, optimizer = _made(_model(2, 64, "ram", dtype), case, gradients, f"{folder}/warm")
    _loop(small, optimizer, 64)
    _close(optimizer)
    del small, optimizer
    gc.collect()
    # Sets malloc's mmap threshold to 32 MiB. 32 MiB is the highest threshold that glibc chooses itself, after a tensor
    # of this size has been freed.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    baseline, at_rest = status("VmRSS"), status("RssAnon")
    made = _model(depth, width, start, dtype)
    parameters = sum(parameter.numel() for parameter in made.parameters())
    model, optimizer = _made(made, case, gradients, f"{folder}/run")
    # Resets the memory peak of the process. The peak of training must not include the peak of making the model.
    Path("/proc/self/clear_refs").write_text("5")
    left = _loop(model, optimizer, _VOCABULARY)
    added, rest = status("VmHWM") - baseline, status("RssAnon") - at_rest
    planned = optimizer.plan.host_peak if case == "offloaded" else 0
    _close(optimizer)
    return {"parameters": parameters, "added": added, "rest": rest, "planned": planned, "left": left}


def _model(depth: int, width: int, start: str, dtype: str) -> Any:
    """Returns a model whose proportions are the same for each width.

    With the width 64, which the warm-up uses, the model has a small vocabulary.
    """
    import torch
    import transformers

    heads = width // 64
    config = transformers.Qwen2Config(
        num_hidden_layers=depth,
        hidden_size=width,
        intermediate_size=width * _INTERMEDIATE // _HIDDEN // 32 * 32,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 3) if heads % max(1, heads // 3) == 0 else 1,
        vocab_size=_VOCABULARY if width > 64 else 64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device("meta" if start == "meta" else "cpu"):
        model = transformers.Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _made(model: Any, case: str, gradients: str, storage: str) -> tuple[Any, Any]:
    import torch

    import memascend

    if case == "offloaded":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return memascend.offload(model, optimizer, storage=storage, gradients=gradients, device="cpu")
    return model, _InRam(model)


def _loop(model: Any, optimizer: Any, vocabulary: int) -> int:
    """Trains; returns the smallest number of bytes that a forward leaves allocated.

    The first forward is not counted, because it warms up. The bytes are allocations of the C library, without Python's
    own objects. The growth of the process would be too small a number, because a forward also uses free memory of the
    heap.
    """
    import torch

    tokens = torch.randint(0, vocabulary, (1, _LENGTH))
    left = []
    for _ in range(_STEPS):
        before = _allocated()
        loss = model(input_ids=tokens, labels=tokens).loss
        left.append(_allocated() - before)
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return min(left[1:])


def _close(optimizer: Any) -> None:
    if hasattr(optimizer, "close"):
        optimizer.close()


class _InRam:
    """Trains without memascend, with torch's fused AdamW on fp32 master weights."""

    def __init__(self, model: Any) -> None:
        import torch

        self.parameters = list(model.parameters())
        self.masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)

    def step(self) -> None:
        import torch

        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                master.grad = parameter.grad.float()
                parameter.grad = None
            self.adam.step()
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)

    def zero_grad(self) -> None:
        self.adam.zero_grad()


class _Mallinfo(ctypes.Structure):
    """The struct `mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _allocated() -> int:
    """Returns the bytes that the C library has allocated, in its heap and in separate mappings."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Mallinfo
    found = ask()
    return int(found.uordblks + found.hblkhd)


def status(name: str) -> int:
    """Returns the size `name` of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise KeyError(name)


if __name__ == "__main__":
    main()
