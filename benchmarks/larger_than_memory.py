"""Trains, saves and resumes a language model whose weights are three times as large as the memory it may use.

    python -m benchmarks.larger_than_memory --limit 96MiB --folder /mnt/nvme

The benchmark also kills the training process and resumes the training from its store. Each part of the benchmark runs
in a separate process, in a memory cgroup with the limit `--limit`. The limit does not include the memory of imported
modules (torch, transformers, memascend). For this, the parent process imports these modules, and each forked process
copies the parent's pages before it enters its cgroup. By default, the weights are three times as large as the limit,
and the training state is 21 times as large as the limit. The benchmark needs root, because it makes cgroups.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # so that the first step does not import it
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

import memascend
import memascend.session.offload
from benchmarks.train.cell.systems.ours import smallest_budget
from memascend.plan.options import parse_bytes
from memascend.text import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    from collections.abc import Callable

# The budget is the smallest budget that works, plus this number of bytes.
_MORE_BYTES = 4 << 20
# The value of MADV_POPULATE_WRITE, an advice of madvise() in Linux 5.14 and later.
_MADV_POPULATE_WRITE = 23
# The value of PR_SET_PDEATHSIG in linux/prctl.h.
_PR_SET_PDEATHSIG = 1
SAVED_AT, KILLED_AFTER, LAST = 2, 3, 4
LENGTH = 64


def config(nbytes: int, width: int) -> Qwen2Config:
    """Returns the configuration of the smallest model of this width whose weights have at least `nbytes` bytes."""
    heads, inner, vocabulary = 8, 11 * width // 4, 1024
    block = 2 * width * width + 2 * width * width // 4 + 3 * width * inner
    blocks = max(2, (nbytes // 2 - 2 * vocabulary * width) // block + 1)
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )


def bodiless(made: Qwen2Config) -> Any:
    """Returns the model on the device "meta", which stores no values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)


def write_shards(made: Qwen2Config, folder: Path, limit: int) -> int:
    """Writes random weights as several safetensors files with an index.

    Large models on Hugging Face have such files. Returns the bytes of all weights.
    """
    folder.mkdir()
    dice = torch.Generator().manual_seed(0)
    parts: list[dict[str, torch.Tensor]] = [{}]
    total = 0
    places = {}
    for name, like in bodiless(made).named_parameters():
        one = name.endswith("norm.weight")
        values = torch.ones(like.shape) if one else torch.randn(like.shape, generator=dice) * 0.02
        if sum(tensor.nbytes for tensor in parts[-1].values()) > limit // 4:
            save_file(parts[-1], folder / f"model-{len(parts):05}.safetensors")
            parts[-1].clear()
            parts.append({})
        parts[-1][name] = values.bfloat16()
        places[name] = f"model-{len(parts):05}.safetensors"
        total += like.nbytes
    save_file(parts[-1], folder / places[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return total


def batch(step: int) -> torch.Tensor:
    """Returns the tokens of a step."""
    return torch.randint(2, 1024, (1, LENGTH), generator=torch.Generator().manual_seed(step))


def logits(model: Any) -> torch.Tensor:
    """Returns the logits of a fixed batch, in eval mode."""
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=batch(10**6)).logits
    model.train()
    return found


class Part:
    """The parts of the benchmark. Each part is a method: `created`, `resumed` or `continued`.

    Each part runs in a separate process, which calls `show` to report values to the parent process.
    """

    def __init__(self, made: Qwen2Config, folder: Path, show: Callable[[str, Any], None]) -> None:
        self.made = made
        self.folder = folder
        self.show = show

    def begin(self, storage: str, **options: Any) -> None:
        """Makes the model on the device "meta" and offloads it."""
        self.model = bodiless(self.made)
        self.model.activation_checkpointing_enable()
        self.model.train()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        (self.folder / storage).mkdir(exist_ok=True)
        options |= {"storage": self.folder / storage, "gradients": "fused", "device": "cpu"}
        # The default budget, which is large enough to keep the disk busy, would exceed the limit of the cgroup.
        options["host_memory"] = smallest_budget(self.model, optimizer, options) + _MORE_BYTES
        self.model, self.optimizer = memascend.offload(self.model, optimizer, **options)

    def train(self, to: int) -> None:
        """Trains up to the step `to`; reports the losses."""
        for step in range(self.optimizer.steps + 1, to + 1):
            tokens = batch(step)
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.show("loss", [step, loss.item().hex()])

    def evaluate(self, name: str) -> None:
        """Saves the logits to the file `name`; generates tokens and reports them."""
        torch.save(logits(self.model), self.folder / name)
        self.model.eval()
        with torch.no_grad():
            made = self.model.generate(batch(7)[:, :8], max_new_tokens=4, do_sample=False, pad_token_id=1)
        self.model.train()
        self.show("generated", made.tolist())

    def created(self) -> None:
        """Trains from the weights in `shards` and saves a checkpoint. Then trains until the process is killed."""
        self.begin("store", weights=self.folder / "shards")
        self.show("plan", self.optimizer.plan.host_peak)
        self.train(SAVED_AT)
        self.evaluate("logits")
        self.optimizer.save(self.folder / "checkpoint")
        self.train(KILLED_AFTER)
        self.show("goes on", None)
        self.train(10**6)

    def resumed(self) -> None:
        """Resumes from the store of the killed process; saves the model with transformers' `save_pretrained`."""
        self.begin("store", existing="resume")
        self.show("resumed at", self.optimizer.steps)
        self.train(LAST)
        self.evaluate("last")
        # `save_pretrained` reads the state dict of the whole model, which is larger than the limit of the cgroup.
        self.model.save_pretrained(self.folder / "saved")
        self.optimizer.close()

    def continued(self) -> None:
        """Trains from the checkpoint, in a new store."""
        self.begin("other", checkpoint=self.folder / "checkpoint")
        self.show("resumed at", self.optimizer.steps)
        self.train(LAST)
        self.evaluate("again")
        self.optimizer.close()


def existing_files() -> None:
    """Copies the writable pages that this forked process shares with its parent.

    The process calls this function before it enters its cgroup. The kernel then does not count these pages in the
    cgroup.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.malloc_trim(0)
    page = os.sysconf("SC_PAGESIZE")
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:  # noqa: PTH123
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            start, end = (int(place, 16) // page for place in span.split("-"))
            if not rights.startswith("rw-p"):
                continue
            entries = memoryview(os.pread(pagemap.fileno(), 8 * (end - start), 8 * start)).cast("Q")
            at = start
            for present, pages in itertools.groupby(entry >> 63 for entry in entries):
                count = len(list(pages))
                if present:
                    libc.madvise(ctypes.c_void_p(at * page), ctypes.c_size_t(count * page), _MADV_POPULATE_WRITE)
                at += count


class Group:
    """A memory cgroup with a limit, of cgroup version 1 or 2."""

    def __init__(self, parent: Path, name: str, limit: int) -> None:
        self.path = parent / name
        self.path.mkdir()
        self._first = (self.path / "memory.limit_in_bytes").exists()
        (self.path / ("memory.limit_in_bytes" if self._first else "memory.max")).write_text(str(limit))
        self.anonymous_peak = 0

    def enter(self) -> None:
        """Moves this process into the cgroup."""
        (self.path / "cgroup.procs").write_text("0")

    def look(self) -> None:
        """Updates the peak of anonymous memory, which the kernel cannot reclaim without swap."""
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        self.anonymous_peak = max(self.anonymous_peak, int(stat["rss" if self._first else "anon"]))

    def end(self) -> dict[str, int]:
        """Removes the cgroup; returns its memory peaks and a count.

        "killed for memory" counts the processes of the cgroup that the kernel killed because the limit was reached.
        """
        peak = self.path / ("memory.max_usage_in_bytes" if self._first else "memory.peak")
        events = (self.path / ("memory.oom_control" if self._first else "memory.events")).read_text()
        found = {
            "anonymous peak": self.anonymous_peak,
            "peak with files": int(peak.read_text()) if peak.exists() else 0,
            "killed for memory": next(int(line.split()[1]) for line in events.splitlines() if "oom_kill " in line),
        }
        for _ in range(1000):
            try:
                self.path.rmdir()
            except OSError:
                time.sleep(0.001)
            else:
                break
        return found


def run(part: str, made: Qwen2Config, folder: Path, parent: Path, limit: int, *, kill: bool) -> dict[str, Any]:
    """Runs a part in its own process and cgroup. If `kill` is True, kills the process once it reports "goes on".

    Returns the values that the part reported, the peak memory of its cgroup, and its seconds. Raises SystemExit if the
    part failed, or if the kernel killed it for memory.
    """
    group = Group(parent, part, limit)
    reads, reply = os.pipe()
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reads)
            # The kernel kills this process if the parent dies. Without this call, the process would continue to run.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            existing_files()
            group.enter()
            getattr(Part(made, folder, lambda *output: os.write(reply, json.dumps(output).encode() + b"\n")), part)()
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(reply)
    os.set_blocking(reads, False)
    text, killed = b"", False
    ended, status = 0, 0
    while not ended:
        group.look()
        try:
            text += os.read(reads, 65536)
        except BlockingIOError:
            time.sleep(0.002)
        if kill and not killed and b"goes on" in text:
            killed = True
            # After this sleep, the process is most likely in the middle of a step.
            time.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
        ended, status = os.waitpid(pid, os.WNOHANG)
    while more := os.read(reads, 65536):
        text += more
    os.close(reads)
    held = group.end()
    if status != (signal.SIGKILL if killed else 0) or held["killed for memory"]:
        raise SystemExit(
            f"the part {part!r} failed with status {status}. It reported {text.decode()!r}; memory: {held}"
        )
    output = [json.loads(line) for line in text.splitlines()]
    return {
        "part": part,
        "seconds": time.perf_counter() - began,
        **held,
        "losses": dict(value for key, value in output if key == "loss"),
        **{key: value for key, value in output if key != "loss"},
    }


def compare(found: dict[str, dict[str, Any]], folder: Path) -> None:
    """Raises SystemExit if two parts have different losses or logits.

    Also raises SystemExit if a part resumed at a wrong step, or if plain transformers computes other logits from the
    saved weights.
    """
    losses: dict[int, str] = {}
    for part in found.values():
        for step, loss in part["losses"].items():
            if losses.setdefault(step, loss) != loss:
                raise SystemExit(
                    f"the loss of step {step} in part {part['part']!r} differs from the loss in an earlier part"
                )
    at = found["resumed"]["resumed at"]
    if at < KILLED_AFTER or found["continued"]["resumed at"] != SAVED_AT:
        raise SystemExit(
            f"wrong step after a restart: resumed at {at}, continued at {found['continued']['resumed at']}"
        )
    same = [("checkpoint", "logits"), ("saved", "last")]
    for saved, output in same:
        plain = AutoModelForCausalLM.from_pretrained(folder / saved)
        if not torch.equal(logits(plain), torch.load(folder / output)):
            raise SystemExit(
                f"with the weights in {saved!r}, plain transformers and memascend compute different logits"
            )
        del plain
    if not torch.equal(torch.load(folder / "last"), torch.load(folder / "again")):
        raise SystemExit("the run resumed from the store and the run resumed from the checkpoint have different logits")


def cgroups(given: Path | None) -> Path:
    """Returns the cgroup in which the parts make their cgroups: `given`, or a new cgroup."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    if given is None:
        given = (first if first.is_dir() else second) / f"memascend-{uuid.uuid4().hex[:8]}"
        given.mkdir()
    if (given / "cgroup.controllers").exists():
        (given / "cgroup.subtree_control").write_text("+memory")
    return given


def main() -> None:
    """Runs the parts and compares them; prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="96MiB", help="memory for each part, without the imported modules")
    parser.add_argument("--times", type=float, default=3, help="size of the weights, divided by the limit")
    parser.add_argument("--width", type=int, default=512, help="width of a block")
    parser.add_argument(
        "--folder", type=Path, help="a disk with space for 60 times the limit (default: that of this file)"
    )
    parser.add_argument("--cgroup", type=Path, help="an empty cgroup in which the parts make their cgroups")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    limit = parse_bytes(options.limit)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    made = config(int(options.times * limit), options.width)
    parent = cgroups(options.cgroup)
    place = options.folder or Path(__file__).resolve().parent
    found = {}
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix="larger-") as name:
            folder = Path(name)
            nbytes = write_shards(made, folder / "shards", limit)
            gc.collect()
            # After this call, the garbage collector does not write to the objects that exist now. So the kernel does
            # not copy the pages of these objects for the forked processes.
            gc.freeze()
            for part in ("created", "resumed", "continued"):
                found[part] = run(part, made, folder, parent, limit, kill=part == "created")
            gc.unfreeze()
            compare(found, folder)
    finally:
        if options.cgroup is None:
            parent.rmdir()
    if options.json:
        print(json.dumps({"limit": limit, "weights": nbytes, "state": 7 * nbytes, "parts": list(found.values())}))
        return
    rows = [
        (
            part["part"],
            *(bytes_shown(part[name]) for name in ("anonymous peak", "peak with files")),
            seconds_shown(part["seconds"]),
        )
        for part in found.values()
    ]
    print(f"limit {bytes_shown(limit)}, weights {bytes_shown(nbytes)}, training state {bytes_shown(7 * nbytes)}")
    print(table(("part", "anonymous peak", "with files", "time"), rows))
    print("no process was killed for memory; losses and logits are bit-identical, also those of plain transformers")


if __name__ == "__main__":
    sys.exit(main())
