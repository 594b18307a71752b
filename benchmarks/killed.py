"""Kills `memascend train` again and again, and compares its losses with the losses of an undisturbed run.

    python -m benchmarks.killed --folder /mnt/nvme --layers 20 --width 2048 --minutes 60 --write benchmarks/results

Both runs train the same model on the same text, with the command that a user types. `examples/small_model.py` makes the
model and the text. The benchmark kills the first run with SIGKILL at random moments within --minutes, and for the last
time when --minutes are over. At such a moment, the run may be loading, opening its store, or making a step. After each
kill, the same command starts the run again. The second run then makes the same number of steps undisturbed.

The result has the number of bit-identical losses. For each kill, it has the number of steps before the kill, and the
seconds from the next start until the next step was done, if the next kill came later. Without --layers, the model is
the largest model whose run fits on the folder's disk. With 1.8 B parameters, two cores and --minutes 60, the benchmark
takes two hours in all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.text import open_pyplot, table

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXAMPLE = Path(__file__).parents[1] / "examples" / "small_model.py"
# The bytes on disk for each parameter: in the model's files, in the store (which has two slots), and in the model that
# is saved at the end.
_BYTES_A_PARAMETER = 34
_KEPT_FREE = 4 << 30
_VOCABULARY = 4096
# The number of steps for which the killed run is started. `Run.steps` finds the progress bar of the training by this
# number. Other progress bars, such as the bar of tokenizing, have other totals.
_STEPS_MAX = 1_000_000
# The largest number of seconds that `Run.run` may take.
_ENDS_SECONDS = 4 * 3600


def main() -> None:
    """Makes both runs, compares them, and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk for the stores (here)")
    parser.add_argument("--layers", type=int, help="layers of the model (default: as many as the disk holds)")
    parser.add_argument("--width", type=int, default=2048, help="width of the model, a multiple of 64 (2048)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the model (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=60, help="minutes from the first start to the last kill (60)")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches in a step (4)")
    parser.add_argument("--max-length", type=int, default=256, help="tokens in a micro-batch (256)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments at which the run is killed")
    parser.add_argument("--write", type=Path, help="a folder for killed.txt, killed.json and killed.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="memascend-bench-") as folder:
        found = measured(options, Path(folder))
    text = shown(options, found)
    print(text)
    if options.write:
        (options.write / "killed.txt").write_text(text + "\n")
        (options.write / "killed.json").write_text(json.dumps(found, indent=1) + "\n")
        draw(options.write / "killed.png", found)


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Makes both runs, one after the other; returns their losses, the kills, and the seconds."""
    layers = options.layers or largest(folder, options.width)
    words = [sys.executable, str(_EXAMPLE), str(folder), "--layers", str(layers), "--width", str(options.width)]
    words += ["--dtype", options.dtype]
    output = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    print(output.replace(str(folder), "the folder"), file=sys.stderr, flush=True)
    killed = Run(options, folder, "killed")
    kills = killed.run_with_kills()
    # The killed run completes one more step after its last kill.
    killed.run(kills[-1]["steps"] + 1)
    losses = killed.losses()
    killed.remove()
    whole = Run(options, folder, "whole")
    seconds = whole.run(len(losses))
    return {
        "model": output.rpartition(" has ")[2].replace(" and ", ", a vocabulary of "),
        "kills": kills,
        "killed": losses,
        "whole": whole.losses(),
        "whole_seconds": seconds,
        "store_bytes": whole.store_bytes(),
        "dtype": options.dtype,
    }


def largest(folder: Path, width: int) -> int:
    """Returns the largest number of layers with which one run fits on the disk.

    The disk needs space for only one run, because the first run is removed before the second run begins.
    """
    block = 4 * width * width + 3 * 3 * width * width
    parameters = (shutil.disk_usage(folder).free - _KEPT_FREE) / _BYTES_A_PARAMETER - 2 * _VOCABULARY * width
    return max(1, int(parameters / block))


class Run:
    """One run of `memascend train`, with all its restarts. The run has a separate folder."""

    def __init__(self, options: argparse.Namespace, folder: Path, name: str) -> None:
        self.options, self.folder = options, folder / name
        self.folder.mkdir()
        self._output = self.folder / "trained"
        self._words = [
            sys.executable, "-m", "memascend", "train", "--model", str(folder / "model"),
            "--data", str(folder / "data" / "texts.jsonl"), "--output", str(self._output),
            "--storage", str(self.folder / "store"), "--lr_scheduler_type", "constant_with_warmup",
            "--warmup_steps", "4", "--max_length", str(options.max_length),
            "--per_device_train_batch_size", "1", "--logging_steps", "1",
            "--gradient_accumulation_steps", str(options.accumulate), "--learning_rate", "1e-4",
        ]  # fmt: skip
        if options.dtype == "float32":
            # TRL turns on bf16 autocast by default. `--bf16 false` turns it off.
            self._words += ["--bf16", "false"]

    def run_with_kills(self) -> list[dict[str, Any]]:
        """Starts the run again and again, and kills it at random moments.

        Returns for each kill the seconds since the first start, the number of steps done, and the seconds from the next
        start until the next step was done. These last seconds are missing if the next kill came first, and for the last
        kill.
        """
        rng = random.Random(self.options.seed)  # noqa: S311 - no secret
        until = 60 * self.options.minutes
        moments = [*sorted(rng.uniform(0, until) for _ in range(self.options.kills - 1)), until]
        began = time.monotonic()
        kills: list[dict[str, Any]] = []
        for moment in moments:
            with self._begun(_STEPS_MAX) as process:
                started = time.monotonic()
                last = kills[-1] if kills else None
                while time.monotonic() < began + moment:
                    if process.poll() is not None:
                        sys.exit(
                            f"{self._said()}\nthe run ended before it was killed, with status {process.returncode}; "
                            "its output is above"
                        )
                    if last and "seconds_to_the_next_step" not in last and self.steps() > last["steps"]:
                        last["seconds_to_the_next_step"] = time.monotonic() - started
                    time.sleep(0.05)
            kills.append({"seconds": time.monotonic() - began, "steps": self.steps()})
            print(f"killed after {kills[-1]['seconds']:.0f} s, {kills[-1]['steps']} steps", file=sys.stderr, flush=True)
        return kills

    def run(self, steps: int) -> float:
        """Runs up to step `steps` without a kill; returns the seconds."""
        began = time.monotonic()
        with self._begun(steps) as process:
            if process.wait(_ENDS_SECONDS):
                sys.exit(f"{self._said()}\nthe run failed with status {process.returncode}; its output is above")
        return time.monotonic() - began

    @contextlib.contextmanager
    def _begun(self, steps: int) -> Iterator[subprocess.Popen[bytes]]:
        """Starts the command and yields its process. At the end, kills the process if it still runs."""
        words = [*self._words, "--max_steps", str(steps)]
        with (self.folder / "said").open("ab") as output:
            process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _said(self) -> str:
        return (self.folder / "said").read_text(errors="replace")[-4000:]

    def losses(self) -> list[float]:
        """Returns the loss of each step, from the log that the finished run saved."""
        history = json.loads((self._output / "trainer_state.json").read_text())["log_history"]
        return [line["loss"] for line in history if "loss" in line]

    def steps(self) -> int:
        """Returns the number of steps done, from the progress bar."""
        output = self.folder / "said"
        found = re.findall(rf"(\d+)/{_STEPS_MAX} \[", output.read_text(errors="replace")) if output.exists() else []
        return int(found[-1]) if found else 0

    def store_bytes(self) -> int:
        """Returns the bytes of the store on disk."""
        place = self.folder / "store"
        files = [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else [place]
        return sum(file.stat().st_blocks * 512 for file in files)

    def remove(self) -> None:
        """Removes the run's folder, to make room for the next run."""
        shutil.rmtree(self.folder)


def shown(options: argparse.Namespace, found: dict[str, Any]) -> str:
    """Returns a text with the table of kills and the number of equal losses."""
    equal = sum(one == other for one, other in zip(found["killed"], found["whole"], strict=True))
    rows = [
        (
            str(at + 1),
            f"{kill['seconds']:.0f}",
            str(kill["steps"]),
            f"{kill['seconds_to_the_next_step']:.0f}" if "seconds_to_the_next_step" in kill else "",
        )
        for at, kill in enumerate(found["kills"])
    ]
    head = ("kill", "after s", "steps done", "s from the next start to its first step")
    return (
        f"{found['model']}, in {found['dtype']}; {options.accumulate} x {options.max_length} tokens a step; a store of "
        f"{found['store_bytes'] / 1e9:.1f} GB\n\n{table(head, rows)}\n\n{equal} of {len(found['whole'])} losses of the "
        f"run that was killed {len(found['kills'])} times equal those of the undisturbed run, in all digits\n"
        f"{found['kills'][-1]['seconds'] / 60:.0f} minutes with the kills, {found['whole_seconds'] / 60:.0f} without"
    )


def draw(path: Path, found: dict[str, Any]) -> None:
    """Draws the losses of both runs, and a line at each kill."""
    plt = open_pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 4), layout="constrained")
    steps = range(1, len(found["whole"]) + 1)
    axes.plot(steps, found["whole"], color="#8c959f", linewidth=5, alpha=0.5, label="never killed")
    axes.plot(steps, found["killed"], color="#1f6feb", linewidth=1.2, label=f"killed {len(found['kills'])} times")
    for at, kill in enumerate(found["kills"]):
        axes.axvline(kill["steps"] + 0.5, color="#cf222e", linewidth=0.8, label=None if at else "kill -9")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    figure.suptitle(found["model"])
    figure.savefig(path, dpi=160)
    plt.close(figure)


if __name__ == "__main__":
    main()
