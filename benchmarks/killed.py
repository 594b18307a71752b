"""Kills `memascend train` again and again, and draws its losses beside a run that nothing killed.

    python -m benchmarks.killed --folder /mnt/nvme --layers 20 --width 2048 --minutes 60 --write benchmarks/results

Both runs train the same model (made on the spot, as by `examples/small_model.py`) on text that every machine has, by
the command that a user types. The first is killed with SIGKILL at moments drawn at random over the minutes, whatever
it is doing then (loading, opening its store, in the midst of a step), and begun again by the same command. The other
one then does as many steps undisturbed. The result says how many losses have the same bits, what each kill came into,
and how long it took until the next step was done. Without --layers the model is the largest whose run the folder's
disk holds. An hour with 1.8 B parameters on two cores takes two hours in all.
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
# Of each parameter: the model, its store with two slots, and the model that is saved at the end.
_BYTES_A_PARAMETER = 34
_KEPT_FREE = 4 << 30
_VOCABULARY = 4096
# Of the run that is killed. The total in its progress tells it from other bars, as that of tokenizing.
_STEPS_MAX = 1_000_000
# A run that needs longer to end has failed.
_ENDS_SECONDS = 4 * 3600


def main() -> None:
    """Run both, compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk that takes the stores (here)")
    parser.add_argument("--layers", type=int, help="of the model (as many as the disk holds)")
    parser.add_argument("--width", type=int, default=2048, help="of the model, a multiple of 64 (2048)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the model (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=60, help="from the first start to the last kill (60)")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches of a step (4)")
    parser.add_argument("--max-length", type=int, default=256, help="tokens of a micro-batch (256)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
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
    """Both runs, one after the other."""
    layers = options.layers or largest(folder, options.width)
    words = [sys.executable, str(_EXAMPLE), str(folder), "--layers", str(layers), "--width", str(options.width)]
    words += ["--dtype", options.dtype]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    print(said.replace(str(folder), "the folder"), file=sys.stderr, flush=True)
    killed = Run(options, folder, "killed")
    kills = killed.run_with_kills()
    # To the end of the step that the last kill interrupted.
    killed.run(kills[-1]["steps"] + 1)
    losses = killed.losses()
    killed.remove()
    whole = Run(options, folder, "whole")
    seconds = whole.run(len(losses))
    return {
        "model": said.rpartition(" has ")[2].replace(" and ", ", a vocabulary of "),
        "kills": kills,
        "killed": losses,
        "whole": whole.losses(),
        "whole_seconds": seconds,
        "store_bytes": whole.store_bytes(),
        "dtype": options.dtype,
    }


def largest(folder: Path, width: int) -> int:
    """As many layers as leave room for a run; of two runs one is removed before the other begins."""
    block = 4 * width * width + 3 * 3 * width * width
    parameters = (shutil.disk_usage(folder).free - _KEPT_FREE) / _BYTES_A_PARAMETER - 2 * _VOCABULARY * width
    return max(1, int(parameters / block))


class Run:
    """A run of the command, in a folder of its own."""

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
            # TRL turns autocast on by itself.
            self._words += ["--bf16", "false"]

    def run_with_kills(self) -> list[dict[str, Any]]:
        """Begin, and kill at each of the moments; what each kill found, and how long it was to the next step."""
        rng = random.Random(self.options.seed)  # noqa: S311 - anybody may foresee it
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
                        sys.exit(f"{self._said()}\nthe run ended by itself, with {process.returncode}")
                    if last and "seconds_to_the_next_step" not in last and self.steps() > last["steps"]:
                        last["seconds_to_the_next_step"] = time.monotonic() - started
                    time.sleep(0.05)
            kills.append({"seconds": time.monotonic() - began, "steps": self.steps()})
            print(f"killed after {kills[-1]['seconds']:.0f} s, {kills[-1]['steps']} steps", file=sys.stderr, flush=True)
        return kills

    def run(self, steps: int) -> float:
        """Do so many steps undisturbed: the seconds that took."""
        began = time.monotonic()
        with self._begun(steps) as process:
            if process.wait(_ENDS_SECONDS):
                sys.exit(f"{self._said()}\nthe run ended with {process.returncode}")
        return time.monotonic() - began

    @contextlib.contextmanager
    def _begun(self, steps: int) -> Iterator[subprocess.Popen[bytes]]:
        """The command, which is killed where this ends, if it has not ended by itself."""
        words = [*self._words, "--max_steps", str(steps)]
        with (self.folder / "said").open("ab") as said:
            process = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _said(self) -> str:
        return (self.folder / "said").read_text(errors="replace")[-4000:]

    def losses(self) -> list[float]:
        """Of each step, as the run that has ended logged them."""
        history = json.loads((self._output / "trainer_state.json").read_text())["log_history"]
        return [line["loss"] for line in history if "loss" in line]

    def steps(self) -> int:
        """That are done, as far as the progress says."""
        said = self.folder / "said"
        found = re.findall(rf"(\d+)/{_STEPS_MAX} \[", said.read_text(errors="replace")) if said.exists() else []
        return int(found[-1]) if found else 0

    def store_bytes(self) -> int:
        """Of the training state on storage."""
        place = self.folder / "store"
        files = [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else [place]
        return sum(file.stat().st_blocks * 512 for file in files)

    def remove(self) -> None:
        """Make room for the next run."""
        shutil.rmtree(self.folder)


def shown(options: argparse.Namespace, found: dict[str, Any]) -> str:
    """What a kill cost, and whether the losses are equal."""
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
        f"run that was killed {len(found['kills'])} times are those of the run that never was, in all digits\n"
        f"{found['kills'][-1]['seconds'] / 60:.0f} minutes with the kills, {found['whole_seconds'] / 60:.0f} without"
    )


def draw(path: Path, found: dict[str, Any]) -> None:
    """Both curves, and where the kills were."""
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
