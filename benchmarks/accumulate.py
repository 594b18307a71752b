"""Measures training steps of several micro-batches, computed in three ways.

"by layer": memascend computes all micro-batches of a block before the next block begins. "one after the other":
memascend computes one whole micro-batch after the other. "torch in memory": torch trains without memascend.

Each case trains in a separate process. The kernel counts the bytes that the process reads and writes. There are four
parts:

- `seconds` compares the three ways. The processes take turns, so that a change of the machine's speed affects all ways.
- `bytes` counts the bytes of steps by layer, with two dtypes, two budgets, and clipping.
- `memory` recomputes blocks in the backward. It compares the peak memory of a step of M micro-batches with the peak
  memory of a step of one micro-batch.
- `trl` trains with TRL's SFTTrainer and DPOTrainer. It compares steps of few large micro-batches with steps of many
  small micro-batches, on the same examples. This part needs TRL, which .venv-clients has.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.turns import Process, at_work, serve

LAYERS, TURNS, MEMORY = "by layer", "one after the other", "torch in memory"
_LENGTHS = (128, 512)
_WARM_STEPS = 2
# The largest value that each ratio may have.
_TARGETS = {"bytes": 1.05, "disk": 0.5, "compute": 1.05, "memory": 1.1}
# The targets "disk" and "compute" apply to steps of `_AT` micro-batches. "disk" judges steps with short micro-batches:
# the drive limits the speed of these steps. "compute" judges steps with long micro-batches: computation limits the
# speed of these steps.
_AT = 8
_BYTES_CASES = {
    "bf16, default": ("bfloat16", {"gradients": "fused"}),
    "bf16, smallest": ("bfloat16", {"gradients": "fused", "host_memory": "smallest"}),
    "fp32, default": ("float32", {"gradients": "fused"}),
    "fp32, smallest": ("float32", {"gradients": "fused", "host_memory": "smallest"}),
    "bf16, clipped": ("bfloat16", {"max_grad_norm": 1.0}),
}
# `_EXAMPLES` is the number of examples in a Trainer's step. The part `trl` measures micro-batches of each size in
# `_SIZES`; a size is a number of examples.
_EXAMPLES, _SIZES = 16, (1, 4, 16)
_MEMORY_CASES = {"kept in memory": {}, 'activations="ssd"': {"activations": "ssd"}}


def main() -> None:
    """Measures the parts named by --parts; prints their tables, and those of earlier runs in the folder of --write.

    With `--show`, measures nothing. With `--work`, this process trains one case.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", choices=("4M", "25M", "125M", "500M"), default="125M")
    default = [part for part in _PARTS if part != "trl" or importlib.util.find_spec("trl")]
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=default)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="the model's dtype (%(default)s)"
    )
    parser.add_argument(
        "--counts", nargs="+", type=int, default=[1, 4, 8, 16], help="numbers of micro-batches in a step"
    )
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=list(_LENGTHS), help="numbers of tokens in a micro-batch"
    )
    parser.add_argument("--rounds", type=int, default=2, help="number of turns of each process")
    parser.add_argument("--steps", type=int, default=2, help="number of steps in a turn")
    parser.add_argument("--storage", default=".", help="a folder on the disk to measure")
    parser.add_argument("--write", metavar="FOLDER", type=Path, help="keep accumulate.json, .txt and .png there")
    parser.add_argument(
        "--show", action="store_true", help="measure nothing: show the results in the folder of --write"
    )
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work = json.loads(options.work)
        serve((_TrainersWorker if "trainer" in work else _Worker)(work).turn)
        return
    found = _kept(options.write)
    if options.show and not found:
        parser.error("--show needs results: pass --write with the folder in which an earlier run wrote accumulate.json")
    if not options.show:
        from benchmarks.machine import described

        found["machine"], found["parameters"] = described(), options.parameters
        for part in options.parts:
            with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-accumulate-") as folder:
                found[part] = _PARTS[part](options, Path(folder))
            # A part takes a long time. Its results are written before the next part begins, so that a failure does not
            # lose them.
            _write(found, options.write)
    print(_write(found, options.write))


def _write(found: dict[str, Any], folder: Path | None) -> str:
    """Returns the tables.

    If `folder` is given, also writes the results and the tables to it, and the picture if there are seconds.
    """
    text = "\n\n".join(_SHOWN[part](found[part]) for part in _PARTS if part in found)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "accumulate.json").write_text(json.dumps(found, indent=1) + "\n")
        about = "\n".join(f"{name}: {value}" for name, value in found["machine"].items())
        (folder / "accumulate.txt").write_text(f"{about}\n{found['parameters']} parameters\n\n{text}\n")
        if "seconds" in found:
            _draw(found["seconds"], folder / "accumulate.png")
    return text


def _kept(folder: Path | None) -> dict[str, Any]:
    """Returns the results that earlier runs wrote to `folder`; an empty dict if there are none.

    The keys are the names of the parts, "machine" and "parameters".
    """
    path = None if folder is None else folder / "accumulate.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    return found


def _seconds(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measures each of the three ways, with each number of micro-batches and each length of a micro-batch."""
    common = {"parameters": options.parameters, "dtype": options.dtype, "options": {"gradients": "fused"}}
    works = {
        name: {**common, "case": name, "storage": str(folder / f"{name}.store")} for name in (LAYERS, TURNS, MEMORY)
    }
    rows = []
    with at_work("accumulate", works, count=1, length=min(options.lengths), steps=1) as processes:
        for length in options.lengths:
            for count in options.counts:
                turns: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
                for _ in range(options.rounds):
                    for name, process in processes.items():
                        turns[name].append(process.ask(count=count, length=length, steps=options.steps))
                rows.append({"length": length, "count": count, **{name: _joined(turns[name]) for name in turns}})
    return rows


def _joined(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Combines all turns of a case: medians of seconds, bytes and processor seconds, and the highest memory peak."""
    return {
        "seconds": statistics.median(taken for turn in turns for taken in turn["seconds"]),
        "moved": statistics.median(turn["read"] + turn["written"] for turn in turns),
        "peak": max(turn["peak"] for turn in turns),
        "processor": statistics.median(turn["processor"] for turn in turns),
    }


def _bytes(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Counts the bytes of steps by layer, for each case of `_BYTES_CASES` and each number of micro-batches."""
    rows = []
    for name, (dtype, given) in _BYTES_CASES.items():
        work = {"case": LAYERS, "parameters": options.parameters, "options": given, "dtype": dtype}
        process = Process("accumulate", {**work, "storage": str(folder / f"{name}.store")})
        try:
            for count in options.counts:
                turn = process.ask(count=count, length=min(options.lengths), steps=options.steps)
                rows.append({"case": name, "count": count, **turn})
        finally:
            process.end()
    return rows


def _memory(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measures the peak memory of steps that recompute blocks, by case and number of micro-batches.

    A new process measures each of these steps.
    """
    rows = []
    for name, given in _MEMORY_CASES.items():
        for count in options.counts:
            common = {"case": LAYERS, "parameters": options.parameters, "dtype": options.dtype}
            work = {**common, "options": {"gradients": "fused", **given}}
            process = Process(
                "accumulate", {**work, "checkpoint": True, "storage": str(folder / f"{name} {count}.store")}
            )
            try:
                turn = process.ask(count=count, length=max(options.lengths), steps=options.steps)
                rows.append({"case": name, "count": count, "length": max(options.lengths), **turn})
            finally:
                process.end()
    return rows


def _trl(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measures TRL's Trainers with micro-batches of several sizes.

    Each case runs in a separate process. Only one of these processes runs at a time.
    """
    works = {
        f"{trainer}, {_EXAMPLES // size} x {size}, {way}": {
            "trainer": trainer, "size": size, "way": way, "length": min(options.lengths),
            "parameters": options.parameters,
        }
        for trainer in ("SFT", "DPO")
        for size in _SIZES
        # DPO is measured only in `TURNS`, because no test covers DPO's loss by layer. A step of one micro-batch is also
        # measured only in `TURNS`, because `LAYERS` would do the same computation.
        for way in ((LAYERS, TURNS) if trainer == "SFT" and size < _EXAMPLES else (TURNS,))
    }  # fmt: skip
    rows = []
    for name, work in works.items():
        (folder / name).mkdir()
        process = Process("accumulate", {**work, "folder": str(folder / name)})
        try:
            rows.append({"case": name, **work, **process.ask(steps=options.steps * options.rounds)})
        finally:
            process.end()
        print(f"{name}: {rows[-1]['seconds']:.2f} s", flush=True)
    return rows


_PARTS = {"seconds": _seconds, "bytes": _bytes, "memory": _memory, "trl": _trl}


# --- tables and picture -----------------------------------------------------------------------


def _seconds_shown(rows: list[dict[str, Any]]) -> str:
    from memascend.text import table

    shown = [
        (
            f"{row['count']} x (1 x {row['length']})",
            *(f"{row[name]['seconds']:.2f}" for name in (LAYERS, TURNS, MEMORY)),
            f"{row[LAYERS]['seconds'] / row[TURNS]['seconds']:.2f}",
            f"{row[LAYERS]['seconds'] / row[MEMORY]['seconds']:.2f}",
            *(f"{row[name]['moved']:.1f}" for name in (LAYERS, TURNS)),
            *(f"{row[name]['peak'] / 1e6:.0f}" for name in (LAYERS, TURNS, MEMORY)),
        )
        for row in rows
    ]
    columns = ("a step", "s by layer", "s in turn", "s in memory", "of in turn", "of in memory", "B/param by layer",
               "B/param in turn", "MB by layer", "MB in turn", "MB in memory")  # fmt: skip
    lines = [table(columns, shown), ""]
    for row in rows:
        if row["count"] != _AT:
            continue
        took = row[LAYERS]["seconds"]
        if row["length"] == min(_LENGTHS):
            lines.append(_judged(f"{_AT} x (1 x {row['length']}), of in turn", took / row[TURNS]["seconds"], "disk"))
        else:
            ratio = took / row[MEMORY]["seconds"]
            lines.append(_judged(f"{_AT} x (1 x {row['length']}), of torch in memory", ratio, "compute"))
    return "\n".join(lines)


def _judged(what: str, ratio: float, target: str) -> str:
    most = _TARGETS[target]
    return f"{what}: {ratio:.3f} (at most {most}: {'met' if ratio <= most else 'MISSED'})"


def _bytes_shown(rows: list[dict[str, Any]]) -> str:
    from memascend.text import table

    ones = {row["case"]: row["read"] + row["written"] for row in rows if row["count"] == 1}
    shown, worst = [], 0.0
    for row in rows:
        ratio = (row["read"] + row["written"]) / ones[row["case"]]
        worst = max(worst, ratio)
        shown.append((row["case"], str(row["count"]), f"{row['read']:.2f}", f"{row['written']:.2f}", f"{ratio:.3f}"))
    columns = ("by layer", "micro-batches", "read B/param", "written B/param", "of one micro-batch")
    return f"{table(columns, shown)}\n\n{_judged('bytes, of one micro-batch', worst, 'bytes')}"


def _memory_shown(rows: list[dict[str, Any]]) -> str:
    from memascend.text import table

    ones = {row["case"]: row for row in rows if row["count"] == 1}
    shown, lines = [], []
    for row in rows:
        one = ones[row["case"]]
        more = row["peak"] - one["peak"]
        # `due` is the memory that a step of several micro-batches may need in addition to a step of one micro-batch.
        # Each micro-batch after the first may add the inputs that its checkpoints save. The step may also add the
        # summed gradients of the largest unit.
        due = (row["count"] - 1) * row["saved"] + (row["largest"] if row["count"] > 1 else 0)
        away = "ssd" in row["case"]
        ratio = row["peak"] / one["peak"]
        cells = (row["case"], str(row["count"]), f"{row['peak'] / 1e6:.0f}", f"{more / 1e6:+.0f}")
        shown.append((*cells, "" if away else f"{due / 1e6:.0f}", f"{ratio:.3f}"))
        if row["count"] == 1:
            continue
        if away:
            lines.append(_judged(f"{row['count']} micro-batches, of one's memory, {row['case']}", ratio, "memory"))
        else:
            met = "met" if more <= due else "MISSED"
            lines.append(f"{row['count']} micro-batches: {more / 1e6:.0f} MB more (at most {due / 1e6:.0f}: {met})")
    columns = ("checkpointed activations", "micro-batches", "MB", "beside one", "at most", "of one")
    return "\n".join([table(columns, shown), "", *lines])


def _trl_shown(rows: list[dict[str, Any]]) -> str:
    from memascend.text import table

    # Users start with micro-batches of one example, computed one after the other. The table compares each case with
    # this case of the same Trainer.
    ones = {row["trainer"]: row["seconds"] for row in rows if (row["size"], row["way"]) == (min(_SIZES), TURNS)}
    shown = [
        (
            row["case"],
            f"{row['seconds']:.2f}",
            f"{row['spread'][0]:.2f}..{row['spread'][1]:.2f}",
            f"{row['seconds'] / ones[row['trainer']]:.2f}",
            f"{row['read']:.1f} + {row['written']:.1f}",
            f"{row['peak'] / 1e6:.0f}",
        )
        for row in rows
    ]
    columns = ("a step, examples", "s", "spread", "of one at a time in turn", "B/param read + written", "MB")
    return table(columns, shown)


_SHOWN = {"seconds": _seconds_shown, "bytes": _bytes_shown, "memory": _memory_shown, "trl": _trl_shown}


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the bytes and the seconds of a step over its number of micro-batches.

    The bytes have one panel. The seconds have a panel for each length. Each way has one line in each panel.
    """
    from memascend.text import IN_MEMORY, OURS, open_pyplot

    plt = open_pyplot()
    lengths = sorted({row["length"] for row in rows})
    figure, axes = plt.subplots(1, 1 + len(lengths), figsize=(4.2 * (1 + len(lengths)), 3.8), layout="constrained")
    styles = {LAYERS: {"color": OURS}, TURNS: {"color": OURS, "linestyle": ":"}, MEMORY: {"color": IN_MEMORY}}
    panels = [("moved", lengths[0], "bytes moved for each parameter")]
    panels += [("seconds", length, f"seconds a step, 1 x {length} each") for length in lengths]
    for axis, (figure_of, length, label) in zip(axes, panels, strict=True):
        chosen = [row for row in rows if row["length"] == length]
        for name, style in styles.items():
            values = [row[name][figure_of] for row in chosen]
            axis.plot([row["count"] for row in chosen], values, marker="o", label=name, **style)
        axis.set(xlabel="micro-batches of a step", ylabel=label, ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# --- a case, in its own process -----------------------------------------------------------------


class _Worker:
    """Trains one case. Makes steps when the main process asks for steps."""

    def __init__(self, work: dict[str, Any]) -> None:
        from dataclasses import replace

        from benchmarks.train.cell.systems.in_ram import InRam
        from benchmarks.train.cell.workload import WORKLOADS, made

        self.case = work["case"]
        plain = WORKLOADS[f"{work['parameters']}-1x128"]
        self.work = replace(plain, dtype=work.get("dtype", "bfloat16"), checkpoint=work.get("checkpoint", False))
        self.model = made(self.work)
        if self.case == MEMORY:
            self.optimizer: Any = InRam(self.model)
        else:
            self.optimizer = self._offloaded(work)
        for _ in range(_WARM_STEPS):
            self._step(2, min(_LENGTHS))

    def _offloaded(self, work: dict[str, Any]) -> Any:
        import torch

        import memascend
        from benchmarks.train.cell.systems.ours import smallest_budget

        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        options = {**work["options"], "storage": work["storage"], "device": "cpu"}
        if options.get("host_memory") == "smallest":
            del options["host_memory"]
            options["host_memory"] = smallest_budget(self.model, optimizer, options)
        return memascend.offload(self.model, optimizer, **options)[1]

    def turn(self, count: int, length: int, steps: int) -> dict[str, Any]:
        """Makes and measures `steps` steps; returns their seconds, bytes and memory peak.

        Each step has `count` micro-batches of `length` tokens. One step that is not measured comes first.
        """
        from benchmarks import counters
        from memascend.cli import process

        # The first step of a turn is not typical: since the last turn, other cases may have trained, the disk has
        # finished its writes, and the state of the machine's memory has changed.
        self._step(count, length)
        process.restart_peak()
        before, seconds = counters.counts(), []
        for _ in range(steps):
            began = time.perf_counter()
            self._step(count, length)
            seconds.append(time.perf_counter() - began)
        moved = counters.counts().since(before)
        parameters = self.work.parameters
        return {
            "seconds": seconds,
            "processor": moved["processor"] / steps,
            "read": moved["read"] / steps / parameters,
            "written": moved["written"] / steps / parameters,
            "peak": process.resident_peak(),
            # "saved": the bytes that one micro-batch saves. Checkpointing saves only the input of each block.
            # "largest": the bytes of the embedding, which is the largest unit with 25M and 125M parameters.
            "saved": self.work.layers * length * self.work.hidden * self.model.dtype.itemsize,
            "largest": self.work.vocabulary * self.work.hidden * self.model.dtype.itemsize,
        }

    def _step(self, count: int, length: int) -> None:
        import torch

        batches = [(torch.arange(length) * 7919 % 9973 % self.work.vocabulary)[None] for _ in range(count)]

        def loss_of(tokens: Any) -> Any:
            return self.model(input_ids=tokens, labels=tokens).loss

        if self.case == MEMORY:
            for tokens in batches:
                (loss_of(tokens) * (1 / count)).backward()
            self.optimizer.update()
            return
        self.optimizer.accumulate(loss_of, batches, scale=1 / count, by_layer=self.case == LAYERS)
        self.optimizer.step()
        self.optimizer.zero_grad()


class _TrainersWorker:
    """Trains with one of TRL's Trainers on texts of equal length."""

    def __init__(self, work: dict[str, Any]) -> None:
        import torch
        from datasets import Dataset

        from benchmarks.train.cell.systems.trainer import tokenizer
        from benchmarks.train.cell.workload import WORKLOADS, made

        self.work = work
        # The Trainer reads the model from this folder. DPOTrainer also reads its reference model from there.
        made(WORKLOADS[f"{work['parameters']}-1x128"]).save_pretrained(f"{work['folder']}/model")
        torch.manual_seed(0)
        self.tokenizer = tokenizer()

        def text(count: int) -> str:
            return " ".join(f"w{number}" for number in torch.randint(1000, (count,)).tolist())

        # DPO computes two sequences for each example: the prompt with the chosen answer, and the prompt with the
        # rejected answer. Each sequence is half as long as an SFT sequence, so that an example has as many tokens with
        # DPO as with SFT.
        length = work["length"] - 1 if work["trainer"] == "SFT" else work["length"] // 2 - 1
        half = length // 2
        texts = [text(length) for _ in range(_EXAMPLES)]
        rows = (
            {"text": texts}
            if work["trainer"] == "SFT"
            else {"prompt": [text(half) for _ in texts], **{name: [f" {text(length - half)}" for _ in texts]
                                                            for name in ("chosen", "rejected")}}
        )  # fmt: skip
        self.rows = Dataset.from_dict(rows)

    def turn(self, steps: int) -> dict[str, Any]:
        """Trains; returns seconds, bytes and the memory peak of `steps` steps.

        The first steps are not measured, because memascend detects the habits of the training loop in them.
        """
        import trl
        from transformers import PrinterCallback, TrainerCallback

        import memascend.trainer
        from benchmarks import counters
        from benchmarks.train.cell.systems.trainer import substeps
        from memascend.cli import process

        begun: list[Any] = []

        class Clock(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                if len(begun) == _WARM_STEPS + 1:
                    process.restart_peak()
                begun.append((time.perf_counter(), counters.counts()))

        config = getattr(trl, f"{self.work['trainer']}Config")(
            self.work["folder"], per_device_train_batch_size=self.work["size"], max_length=self.work["length"],
            gradient_accumulation_steps=_EXAMPLES // self.work["size"], max_steps=_WARM_STEPS + 2 + steps,
            report_to="none", save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True,
            gradient_checkpointing=False, learning_rate=1e-5, logging_strategy="no",
            model_init_kwargs={"dtype": "auto"},
        )  # fmt: skip
        with memascend.trainer.loading():
            trainer = getattr(trl, f"{self.work['trainer']}Trainer")(
                f"{self.work['folder']}/model", args=config, train_dataset=self.rows, processing_class=self.tokenizer,
                callbacks=[Clock()],
            )  # fmt: skip
        # PrinterCallback would print lines to standard output, and `Process.ask` would mistake these lines for the
        # answer.
        trainer.remove_callback(PrinterCallback)
        if self.work["way"] == TURNS and self.work["trainer"] == "SFT":
            trainer.add_callback(substeps())
        optimizer: Any = memascend.trainer.offload(trainer, storage=f"{self.work['folder']}/run.store", device="cpu")
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        trainer.train()
        optimizer.close()
        # `times` leaves out the warm-up steps and the last step.
        times = begun[_WARM_STEPS:-1]
        seconds = [after[0] - before[0] for before, after in itertools.pairwise(times)]
        moved = times[-1][1].since(times[0][1])
        return {
            "seconds": statistics.median(seconds),
            "spread": [min(seconds), max(seconds)],
            "read": moved["read"] / len(seconds) / parameters,
            "written": moved["written"] / len(seconds) / parameters,
            "peak": process.resident_peak(),
        }


if __name__ == "__main__":
    main()
