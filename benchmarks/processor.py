"""Prints a plan like `memascend plan`, for training on this processor, from measured times of this processor.

The benchmark runs forward and backward of the model itself, on random values. If this would take too long or too much
memory, it runs two models with fewer blocks, and computes the time of all blocks from these two measurements.

The benchmark also measures the update in each format of `--state`, a checksum, a copy of a gradient, and the time that
Python code takes for each parameter. The plan adds the times of copies and of Python code to the computation. If torch
computes on all cores, it also adds the times of updates and checksums: this work delays one of torch's threads, and the
other threads wait for this thread.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.reduced import adamw_reduced, encoded
from memascend import engine, kernels
from memascend.cli import plan as plans
from memascend.cli.plan.model import recompute, settle, without_gradients_kept
from memascend.cli.storage import disk_folder
from memascend.errors import ConfigError, StorageError
from memascend.memory import end_heap_step, settle_heap
from memascend.plan.cost import Host, assumed_host
from memascend.session.offload import offload
from memascend.text import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memascend.cli.plan.answer import Question
    from memascend.cli.plan.subject import Trace
    from memascend.plan.table import Plan

# The largest number of counted passes for each depth of the model, and the seconds after which no further pass begins.
# The first pass is not counted, because it maps memory and loads code. At least one pass is counted.
_PASSES, _SECONDS = 5, 10.0
# The largest number of bytes that the random values may take, if this allows two blocks. For a larger model,
# `_model_seconds` runs fewer blocks, and extrapolates the time of all blocks.
_VALUES_BYTES = 1 << 30
_ELEMENTS = 4 << 20
_TRIES = 3
# The size of a model with almost no arithmetic. A step of this model takes the time of the Python code for its
# parameters.
_WIDTH, _BLOCKS, _STEPS = 32, 16, 8


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The measured times, in seconds."""

    forward_seconds: float  # forward of the whole batch, on all threads of torch
    backward_seconds: float  # backward of the whole batch, on all threads of torch
    # The update of one element by AdamW, on one thread. The keys are the formats of the state.
    update_seconds: Mapping[str, float]
    check_seconds: float  # the checksum of one byte, on one thread
    copy_seconds: float  # the copy of one byte of a gradient to the engine, on one thread
    bind_seconds: float  # Python code in a forward, for each parameter tensor
    hand_seconds: float  # Python code in a backward and `step()`, for each parameter tensor


def main(words: Sequence[str] | None = None) -> int:
    """Prints a plan. Takes the same options as `memascend plan`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plans.add_arguments(parser)
    # The measurement computes the loss in the model's own code, so the plan must assume this loss. `--loss` overrides
    # it.
    parser.set_defaults(loss="full")
    options = parser.parse_args(words)
    return plans.print_answer(options, _with_processor(plans.ask(options)))


def _with_processor(question: Question) -> Question:
    if question.gpu is not None:
        raise ConfigError(
            "this program plans training on the processor: leave --gpu out; on a machine with a GPU, add --device cpu"
        )
    if isinstance(question.trace, str):
        return question
    folders = (path if path.is_dir() else path.parent for path in map(Path, question.options.paths or ()))
    model = question.subject.module
    if model is None:
        raise ConfigError("a built-in shape has no code to measure: pass a config.json or its folder")
    processor = measure(model, question.trace, (question.sequences, question.length), next(folders, None))
    return replace(question, measured=partial(_taken, processor), processor=None)


def _taken(processor: Processor, plan: Plan, state: str) -> tuple[float, float, Host]:
    """Returns the seconds of a forward, the seconds of a backward, and the host's speeds.

    `Question.measured` calls this function.
    """
    parameters = sum(len(unit.parameters) for unit in plan.units)
    handed = sum(unit.nbytes - unit.frozen_bytes for unit in plan.units) * processor.copy_seconds
    forward = processor.forward_seconds + parameters * processor.bind_seconds
    backward = processor.backward_seconds + parameters * processor.hand_seconds + handed
    threads = torch.get_num_threads()
    # If torch does not use all processors, the update runs on a free processor while torch computes.
    host = assumed_host(None, shared=threads >= len(os.sched_getaffinity(0)))
    update = processor.update_seconds[state]
    return forward, backward, replace(host, update=update, check=processor.check_seconds, ram_tier_threads=threads)


def measure(model: nn.Module, trace: Trace, shape: tuple[int, int], folder: Path | None) -> Processor:
    """Measures the model's forward and backward, and the other parts of a step.

    Args:
        model: the model, on "meta".
        trace: describes one forward and backward of the model. `trace.recomputes` is True if blocks are recomputed.
        shape: the number of sequences, and the number of tokens in a sequence.
        folder: the folder for the store of a small model. If it is None, `disk_folder` chooses the folder.
    """
    with Progress("measuring this processor", 4, unit="parts") as progress:
        forward, backward = _model_seconds(model, trace, shape)
        progress.add(1)
        bind, hand = parameter_seconds(folder)
        progress.add(1)
        update = update_seconds()
        progress.add(1)
        check, copied = byte_seconds()
        progress.add(1)
    return Processor(
        forward_seconds=forward,
        backward_seconds=backward,
        update_seconds=update,
        check_seconds=check,
        copy_seconds=copied,
        bind_seconds=bind,
        hand_seconds=hand,
    )


def _model_seconds(model: nn.Module, trace: Trace, shape: tuple[int, int]) -> tuple[float, float]:
    """Returns the seconds of the model's forward and backward. For a large model, computes them from fewer blocks."""
    values = sum(parameter.nbytes for parameter in model.parameters())
    depth = _depth(model)
    first = _pass_seconds(model, 1, trace, shape)
    if depth == 1:
        return first
    block = values - sum(parameter.nbytes for parameter in _shallow(model, depth - 1).parameters())
    at_once = min(_SECONDS / (sum(first) * (_PASSES + 1)), (_VALUES_BYTES - values) / max(1, block) + depth)
    deeper = min(depth, max(2, int(at_once)))
    second = _pass_seconds(model, deeper, trace, shape)
    forward, backward = (
        least + max(0.0, more - least) * (depth - 1) / (deeper - 1) for least, more in zip(first, second, strict=True)
    )
    return forward, backward


def _lists(model: nn.Module) -> list[tuple[nn.Module, str, nn.ModuleList]]:
    """Returns the outermost lists of blocks. Each list comes with its parent module and its name in the parent."""
    found = []
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            found.append((model, name, child))
        else:
            found += _lists(child)
    return found


def _depth(model: nn.Module) -> int:
    """Returns the number of blocks in each list of blocks.

    Returns 1 if there is no list, or if the lists have different lengths or unlike blocks: then only the whole model
    can be measured.
    """
    lists = [blocks for _, _, blocks in _lists(model)]
    equal = all(len({_kind(block) for block in blocks}) == 1 for blocks in lists)
    return len(lists[0]) if lists and equal and len(set(map(len, lists))) == 1 else 1


def _kind(block: nn.Module) -> tuple[object, ...]:
    return (type(block), *(tuple(parameter.shape) for parameter in block.parameters()))


def _shallow(model: nn.Module, depth: int) -> nn.Module:
    """Returns a copy of the model with only its first `depth` blocks; with all blocks if `_depth` is 1."""
    equal = _depth(model) > 1
    made = copy.deepcopy(model)
    for parent, name, blocks in _lists(made) if equal else ():
        setattr(parent, name, blocks[:depth])
    return made


def _pass_seconds(model: nn.Module, depth: int, trace: Trace, shape: tuple[int, int]) -> tuple[float, float]:
    """Returns the median seconds of a forward and of a backward of the model with only its first `depth` blocks."""
    made = _shallow(model, depth)
    settle(made)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.uniform_(-0.05, 0.05)
        for buffer in made.buffers():
            buffer.zero_()
    made.train()
    # `describe` in `memascend.cli.plan.model` made the model. It makes only language models of transformers, which have
    # a `config`.
    config = made.config
    config.use_cache = False  # type: ignore[union-attr]
    if trace.recomputes:
        recompute(made)
    tokens = torch.randint(config.vocab_size, shape)  # type: ignore[union-attr, arg-type]
    passes: list[tuple[float, float]] = []
    began = time.perf_counter()
    # `offload()` calls the same function, so the heap behaves as in training.
    settle_heap()
    with without_gradients_kept(made):
        while len(passes) <= _PASSES and (len(passes) < 2 or time.perf_counter() - began < _SECONDS):
            before = time.perf_counter()
            loss = made(input_ids=tokens, labels=tokens).loss
            between = time.perf_counter()
            loss.backward()
            del loss
            passes.append((between - before, time.perf_counter() - between))
            end_heap_step(1, sum(parameter.nbytes for parameter in made.parameters()))
    forward, backward = zip(*passes[1:], strict=True)
    return statistics.median(forward), statistics.median(backward)


def parameter_seconds(folder: Path | None) -> tuple[float, float]:
    """Returns the seconds that offloading adds for each parameter: in the forward, and in the backward with `step()`.

    Only processor time of the computing thread is counted. The parameters are tiny, so the work on their bytes takes
    almost no time.
    """
    model = _small_model()
    plain, count = _step_seconds(model, None), len(list(model.parameters()))
    try:
        with tempfile.TemporaryDirectory(dir=folder or disk_folder(), prefix=".memascend-plan-") as place:
            model = _small_model()
            optimizer = torch.optim.AdamW(model.parameters())
            model, offloaded = offload(model, optimizer, storage=f"{place}/store", device="cpu", gradients="fused")
            with offloaded:
                streamed = _step_seconds(model, offloaded)
    except (ConfigError, StorageError) as error:
        raise ConfigError(f"a small model cannot be offloaded here: name a disk with --storage ({error})") from error
    forward, rest = (max(0.0, ours - torchs) / count for ours, torchs in zip(streamed, plain, strict=True))
    return forward, rest


def _small_model() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(4)), nn.LayerNorm(_WIDTH)) for _ in range(_BLOCKS))
    )


def _step_seconds(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[float, float]:
    """Returns this thread's processor seconds in a forward, and in a backward with `step()`. Waits are not counted."""
    given = torch.rand(1, _WIDTH)
    found = []
    for _ in range(_STEPS):
        before = time.thread_time()
        loss = model(given).sum()
        between = time.thread_time()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        found.append((between - before, time.thread_time() - between))
    forward, rest = zip(*found[2:], strict=True)
    return statistics.median(forward), statistics.median(rest)


def update_seconds() -> dict[str, float]:
    """Returns the seconds in which one thread updates one element. The keys are the formats of the state.

    All threads of torch run the update at the same time. So the threads compete for memory, as in a training step.
    """
    threads = torch.get_num_threads()
    numbers: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "threads": threads}
    master, first, second = (torch.rand(_ELEMENTS) for _ in range(3))
    gradient, weight = torch.rand(_ELEMENTS).bfloat16(), master.bfloat16()

    def exact() -> None:
        kernels.adamw(master, gradient, first, second, weight, step=1, **numbers)

    found = {"fp32": _shortest(exact)}
    for state in ("bf16", "8bit"):
        form = f"compact {state}"
        values = master.bfloat16()
        kept = encoded(values, {"master": master, "exp_avg": first, "exp_avg_sq": second}, form)

        def reduced(values: torch.Tensor = values, kept: dict[str, torch.Tensor] = kept, form: str = form) -> None:
            adamw_reduced(values, kept, gradient, form=form, step=1, **numbers)

        found[state] = _shortest(reduced)
    return {state: threads * took / _ELEMENTS for state, took in found.items()}


def byte_seconds() -> tuple[float, float]:
    """Returns the seconds in which one thread computes the checksum of one byte, and in which it copies one byte."""
    given, taken = torch.rand(_ELEMENTS), torch.empty(_ELEMENTS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        copied = _shortest(lambda: taken.copy_(given))
    finally:
        torch.set_num_threads(threads)
    return _shortest(lambda: engine.checksum_of(given)) / given.nbytes, copied / given.nbytes


def _shortest(call: Callable[[], object]) -> float:
    took = []
    for _ in range(_TRIES):
        before = time.perf_counter()
        call()
        took.append(time.perf_counter() - before)
    return min(took)


if __name__ == "__main__":
    raise SystemExit(main())
