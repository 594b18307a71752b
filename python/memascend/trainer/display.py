"""Shows a training in the terminal: a header at its start, figures of each step, and totals at its end."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from memascend.plan.decision import nearest
from memascend.plan.hardware import ENDURANCE_PER_TB
from memascend.plan.spare import HostMemory
from memascend.session.optimizer import session_of
from memascend.text import bytes_shown, counted, duration_shown, seconds_shown, terabytes_shown
from memascend.trainer.callback import FIGURES, counted_in, offloaded_optimizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.session.optimizer import OffloadedOptimizer
    from memascend.trainer.forecast import Forecast
    from memascend.trainer.resume import Resume

# The number of latest steps from which the remaining time is estimated.
_RECENT = 10
_TB = 10**12
# In a batch, the name of each tensor with token ids ends with this text.
_IDS = "input_ids"
# In GB/s: the smallest drive speed that is shown with two decimals. A lower speed is shown with three decimals.
_FAST = 0.1
# A smaller share of the bytes that a drive is warranted for is shown as "less than" this share.
_LEAST_SHARE = 1e-4


def is_shown(args: Any) -> bool:
    """True if the Trainer's `log_level` lets `Display` print."""
    return args.log_level not in ("error", "critical")


def print_in_words(printing: TrainerCallback) -> None:
    """Removes `FIGURES` from the logs that a callback prints, because `Display` shows memory and I/O in words."""
    own = printing.on_log

    def on_log(*given: Any, logs: dict[str, Any], **others: Any) -> None:
        own(*given, logs={name: value for name, value in logs.items() if name not in FIGURES}, **others)

    printing.on_log = on_log  # type: ignore[method-assign, assignment]


class Display(TrainerCallback):
    """Prints header, steps and totals to stderr on rank 0, unless the `log_level` is "error" or "critical"."""

    def __init__(self, trainer: Any, resume: Resume, forecast: Forecast | None) -> None:
        self.examples: str | None = (
            None  # the header's text about the examples; None: the header shows the number of examples
        )
        self._trainer, self._resume, self._forecast = trainer, resume, forecast
        self._optimizer: OffloadedOptimizer | None = None
        self._silent = True
        # The result of `_now()` at the end of the last step, or before the first step. None until then.
        self._last: tuple[float, int, float] | None = None
        # The number of tokens in the batches of the current step.
        self._tokens = 0
        self._recent: list[float] = []
        self._line = ""
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
        """Prints the header of the training."""
        self._optimizer = offloaded_optimizer(others.get("optimizer"))
        self._silent = not state.is_world_process_zero or not is_shown(args)
        self._first_step = self._optimizer.steps
        if not self._silent:
            _print(self._header(others["model"], args, state))

    def count(self, batches: Sequence[Any]) -> None:
        """Counts the tokens of a step's batches."""
        self._tokens = 0 if self._silent else sum(map(_tokens_of, batches))

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ARG002
        """Begins to measure before the first step that is computed.

        A resume repeats the last step without computing it; `Resume` mutes this event for the repeated step.
        """
        if self._last is None and not self._silent:
            self._last = self._now()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Measures the step. Shows its figures at the end of the Trainer's progress bar, if the Trainer has a bar."""
        if self._last is None:
            return
        now, then = self._now(), self._last
        self._last = now
        took, moved, waited = (after - before for after, before in zip(now, then, strict=True))
        self._recent = [*self._recent[-_RECENT + 1 :], took]
        took = max(took, 1e-9)
        speed = f"{self._tokens * args.world_size / took:,.0f} tokens/s, " if self._tokens else ""
        rate = moved / took / 1e9
        drive = (
            f"drive {rate:.{2 if rate >= _FAST else 3}f} GB/s, waited for it {min(1.0, waited / took):.0%} of the time"
        )
        left = (state.max_steps - state.global_step) * sum(self._recent) / len(self._recent)
        self._line = f"{seconds_shown(took)} a step, {speed}{drive}"
        if (bar := self._bar()) is not None:
            # The bar itself shows the remaining time.
            bar.set_postfix_str(f"{speed}{drive}", refresh=False)
        self._line += f", {duration_shown(left)} left" if left else ""

    def on_log(self, args: Any, state: Any, *_: Any, **others: Any) -> None:  # noqa: ARG002
        """Prints the figures of the last step when the Trainer logs a loss, if the Trainer has no progress bar."""
        if self._line and "loss" in others["logs"] and self._bar() is None:
            _print(f"memascend: step {state.global_step} of {state.max_steps}: {self._line}")

    def end(self) -> None:
        """Prints steps, time and written bytes of this process; after a resume, also the bytes of the whole training.

        `Resume.train()` calls this method after the training.
        """
        assert self._optimizer is not None
        steps = self._optimizer.steps - self._first_step
        if self._silent or not steps:
            return
        session = session_of(self._optimizer)
        report = session.report()
        written = counted_in(report)[1]
        whole = self._resume.written
        life = ""
        files = _files(self._optimizer)
        # A block device may be a partition, so its size does not show the endurance of the whole drive.
        if not any(file.is_block_device() for file in files):
            size = sum(one.total for one in _usages(files))
            warranted = -(-size // _TB) * ENDURANCE_PER_TB * _TB
            share = whole / warranted
            shown = f"{share:.2%}" if share >= _LEAST_SHARE else f"less than {_LEAST_SHARE:.2%}"
            life = f"; {shown} of the {terabytes_shown(warranted)} that a consumer drive of this size is warranted for"
        took = duration_shown(report.seconds["wall"])
        earlier = f" ({terabytes_shown(whole)} with the earlier starts)" if whole > written else ""
        _print(f"memascend: {counted(steps, 'step')} in {took}: {terabytes_shown(written)} written{earlier}{life}")

    def _now(self) -> tuple[float, int, float]:
        """Returns the time, the total bytes moved and the total seconds of waiting."""
        assert self._optimizer is not None
        read, written, waited = counted_in(session_of(self._optimizer).report())
        return time.perf_counter(), read + written, waited

    def _bar(self) -> Any:
        """Returns the Trainer's progress bar, or None."""
        bars = (getattr(callback, "training_bar", None) for callback in self._trainer.callback_handler.callbacks)
        return next((bar for bar in bars if hasattr(bar, "set_postfix_str")), None)

    def _header(self, model: Any, args: Any, state: Any) -> str:
        assert self._optimizer is not None
        done, steps = self._optimizer.steps, state.max_steps
        title = f"a new run of {counted(steps, 'step')}"
        if done >= steps:
            title = f"this run is finished: step {done} of {steps}"
        elif done:
            title = f"resuming at step {done + 1} of {steps}"
        rows = [
            ("model", _model_in_words(model)),
            ("device", _device_in_words(args.device, self._optimizer)),
            ("RAM", self._ram_in_words()),
            ("drive", self._drive_in_words()),
            ("examples", self.examples or self._examples_in_words()),
            ("steps", self._steps_in_words(args, steps, done)),
        ]
        return "\n".join([f"memascend: {title}", *(f"  {name:<9} {words}" for name, words in rows)])

    def _ram_in_words(self) -> str:
        assert self._optimizer is not None
        plan, here = self._optimizer.plan, HostMemory.here()
        tier = f", with {counted(len(plan.ram_tier), 'parameter')} kept in RAM" if plan.ram_tier else ""
        free = f"{bytes_shown(here.available)} free of {bytes_shown(here.total)}"
        return f"{bytes_shown(plan.host_peak)} of a budget of {bytes_shown(plan.budget)}{tier}; {free}"

    def _drive_in_words(self) -> str:
        assert self._optimizer is not None
        files = _files(self._optimizer)
        usages = _usages(files)
        there = f"; {bytes_shown(sum(one.free for one in usages))} free" if usages else ""
        return f"{bytes_shown(self._optimizer.plan.storage_bytes)} in {', '.join(map(str, files))}{there}"

    def _examples_in_words(self) -> str:
        data = self._trainer.train_dataset
        return f"{len(data):,}" if has_length(data) else "a stream"

    def _steps_in_words(self, args: Any, steps: int, done: int) -> str:
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        found = f"{steps:,} of {counted(size, 'example')}"
        left, forecast = steps - done, self._forecast
        if left <= 0 or forecast is None:
            return found
        written = f"{terabytes_shown(left * forecast.written)} written"
        if (before := self._resume.seconds_of_step) is not None:
            return f"{found}; {duration_shown(left * before)} left, as the steps before took, and {written}"
        if forecast.seconds is None:
            return f"{found}; {written}; the hours are shown after the first step"
        return f"{found}; {duration_shown(left * forecast.seconds)} and {written}, predicted for {forecast.assumed}"


def _model_in_words(model: Any) -> str:
    parameters = list(model.parameters())
    count, trained = (sum(one.numel() for one in parameters if one.requires_grad or of_all) for of_all in (True, False))
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    kinds = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in parameters}))
    of_them = "all trained" if trained == count else f"{trained:,} trained"
    return f"{type(model).__name__}{f' of {name}' if name else ''}: {count:,} parameters, {of_them}; {kinds}"


def _device_in_words(device: torch.device, optimizer: OffloadedOptimizer) -> str:
    if device.type != "cuda":
        return f"this processor, {counted(torch.get_num_threads(), 'thread')}"
    free, total = torch.cuda.mem_get_info(device)
    own = f"{bytes_shown(optimizer.plan.device_peak)} for parameters and gradients"
    return f"{torch.cuda.get_device_name(device)}: {own}; {bytes_shown(free)} free of {bytes_shown(total)}"


def _files(optimizer: OffloadedOptimizer) -> list[Path]:
    return [Path(file) for file in session_of(optimizer).run.resources.store.info()["devices"]]


def _usages(files: Sequence[Path]) -> list[Any]:
    """Returns the total and free bytes of each file system that has one of the files. Skips block devices."""
    places = [nearest(file) for file in files if not file.is_block_device()]
    return [shutil.disk_usage(place) for place in {place.stat().st_dev: place for place in places}.values()]


def _tokens_of(batch: Any) -> int:
    """Returns the number of tokens in a batch; 0 if the batch has no tokens.

    If the batch has an attention mask, padding does not count.
    """
    if not hasattr(batch, "items"):
        return 0
    count = 0
    for name, ids in batch.items():
        if isinstance(name, str) and name.endswith(_IDS) and isinstance(ids, torch.Tensor):
            mask = batch.get(name.removesuffix(_IDS) + "attention_mask")
            is_mask = isinstance(mask, torch.Tensor) and mask.shape == ids.shape
            count += int(mask.sum()) if is_mask else ids.numel()
    return count


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
