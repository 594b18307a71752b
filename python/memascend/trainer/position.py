"""Encodes a Trainer's position for a commit, as text of bounded size.

A position has counters, sums of losses, log lines, states of callbacks, random states and the place in the data.
"""

from __future__ import annotations

import base64
import json
import random
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memascend.errors import ConfigError, CorruptionError
from memascend.optim.shared import plain, restored, storable
from memascend.text import warn
from memascend.trainer import names
from memascend.trainer.kept import fill, packed, replace, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# The largest size of an encoded position. A commit has 128 KiB for options, schedulers and the position together.
_BYTES_MAX = 56 << 10
# TRL's Trainers log averages of lists that have one number for each micro-batch. `_summed()` sums lists longer than
# this.
_NUMBERS_MAX = 256
# `encoded()` does not shorten a list of a callback or of a kept attribute that has fewer entries than this.
_SHORTEST = 16
# The largest number of log lines in a position. Each step encodes and writes the position: 300 lines usually fit, and
# encoding 10,000 lines took 0.1 s.
_LINES_MAX = 300
# Fields of TrainerState that a position leaves out, because the Trainer sets these fields at each start or because the
# position stores their values under other names.
_NOT_KEPT = {"global_step", "log_history", "stateful_callbacks", "max_steps", "num_train_epochs", "train_batch_size"}
_NOT_KEPT |= {"logging_steps", "eval_steps", "save_steps", "trial_name", "trial_params", "is_hyper_param_search"}
_NOT_KEPT |= {"is_local_process_zero", "is_world_process_zero"}


class RandomNumbers:
    """The states of the process's global random generators at one moment.

    These are the generators of Python, numpy and torch's CPU, and of each CUDA device if CUDA is initialized.
    """

    def __init__(self, states: list[Any]) -> None:
        """`states`: the states, in the order in which `now()` collects them."""
        self.states = states

    @classmethod
    def now(cls) -> RandomNumbers:
        """Returns the current states of the process's generators."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls([random.getstate(), np.random.get_state(), torch.get_rng_state(), *cuda])  # noqa: NPY002

    def restore(self) -> None:
        """Sets the process's generators to these states."""
        python, numpy, cpu, *cuda = self.states
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    def to_json(self) -> list[Any]:
        """Returns the states as JSON."""
        (version, words, gauss), (kind, keys, *rest), *tensors = self.states
        parts = [torch.from_numpy(np.array(part, np.uint32)) for part in (words, keys)]
        return [version, gauss, kind, rest, *map(encoded_state, [*parts, *tensors])]

    @classmethod
    def of(cls, states: list[Any]) -> RandomNumbers:
        """Decodes states that `to_json()` returned."""
        version, gauss, kind, rest, *parts = states
        words, keys, *tensors = map(state_of, parts)
        python = (version, tuple(words.view(torch.uint32).tolist()), gauss)
        return cls([python, (kind, keys.view(torch.uint32).numpy(), *rest), *tensors])


def encoded_state(state: torch.Tensor) -> str:
    """Encodes a generator's state as text."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def state_of(text: str) -> torch.Tensor:
    """Decodes the text of `encoded_state()`. Returns the state as a tensor of bytes."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def encoded(position: dict[str, Any]) -> str:
    """Encodes a position as text of at most `_BYTES_MAX` characters.

    If the text is too long, first drops the oldest lines of the log, and adds their number to "left_out". If the text
    is still too long, drops the older halves of the longest lists in the states of callbacks and in kept attributes.

    Raises:
        ConfigError: the text is still too long after that.
    """
    lines = position["log_history"]
    while True:
        text = base64.b85encode(zlib.compress(json.dumps(position).encode(), 1)).decode()
        if len(text) <= _BYTES_MAX:
            return text
        if lines:
            dropped = -(-len(lines) // 4)
            position["left_out"] = position["left_out"] + dropped
            position["log_history"] = lines = lines[dropped:]
            continue
        ended = position.get("ended", {})
        own = [one.get(name, {}) for one in (position, ended) for name in ("callbacks", "kept")]
        longest = max(_lists(own), key=len, default=[])
        if len(longest) < _SHORTEST:
            large = max(position, key=lambda name: len(json.dumps(position[name])))
            raise ConfigError(
                f"the Trainer's position takes {len(text)} bytes, but a commit has room for {_BYTES_MAX}. The largest "
                f"part is {large!r}. Store less in stateful callbacks, in schedulers and in the attributes of keep=, "
                "and use fewer random generators in the data set, the collator and the sampler"
            )
        del longest[: len(longest) // 2]


def _lists(value: Any) -> Iterator[list[Any]]:
    """Yields the lists in a JSON value, at any depth."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, list):
        yield value
    for part in parts:
        yield from _lists(part)


def decoded(text: str, where: str) -> dict[str, Any]:
    """Decodes a position that `encoded()` returned. `where`: names the store or the folder in the error message.

    Raises:
        CorruptionError: `text` is not an encoded position.
    """
    try:
        found: dict[str, Any] = json.loads(zlib.decompress(base64.b85decode(text)))
    except (ValueError, zlib.error) as error:
        raise CorruptionError(
            f"the Trainer's position in {where} is damaged and cannot be read: {error}. Resume from another "
            'checkpoint, or start a new training with existing="replace"'
        ) from error
    return found


class TrainerSnapshot:
    """Reads and restores a Trainer's counters and sums, the states of its callbacks, and its attributes in `keep`."""

    def __init__(self, trainer: Any, keep: Sequence[str] = ()) -> None:
        """`keep`: names of attributes of `trainer` whose values `taken()` includes."""
        self._trainer, self._keep = trainer, tuple(keep)
        self._warned = False

    def taken(self) -> dict[str, Any]:
        """Returns the current values, as JSON.

        Raises:
            ConfigError: the state of a callback or a kept attribute contains an object that `packed()` rejects.
        """
        trainer = self._trainer
        lines = trainer.state.log_history
        state = {name: value for name, value in vars(trainer.state).items() if name not in _NOT_KEPT}
        own = {
            "callbacks": {
                name: [packed(one.state(), f"the state() of {name}") for one in found]
                for name, found in self._stateful()
            },
            "kept": {name: packed(getattr(trainer, name), f"{name!r} of keep=") for name in self._keep},
        }
        self._warn_of_size(own)
        return {
            **own,
            "state": numbers(state),
            # Axolotl keeps counts of tokens in TrainerState, as dicts of tensors.
            "tensors": {name: _summed(value) for name, value in state.items() if _are_tensors(value)},
            "log_history": [numbers(line) for line in lines[-_LINES_MAX:]],
            "left_out": max(0, len(lines) - _LINES_MAX),
            "sums": {name: plain(getattr(trainer, name)) for name in names.SUMS if hasattr(trainer, name)},
            "averages": {name: _summed(getattr(trainer, name)) for name in names.AVERAGES if hasattr(trainer, name)},
            "scaler": _scaler_after(trainer.accelerator.scaler),
        }

    def _warn_of_size(self, own: dict[str, Any]) -> None:
        """Warns once if the states of callbacks and the kept attributes have more than `_BYTES_MAX` bytes as JSON."""
        size = len(json.dumps(own))
        if size > _BYTES_MAX and not self._warned:
            self._warned = True
            largest = max((len(json.dumps(part)), name) for kind in own.values() for name, part in kind.items())[1]
            warn(
                f"stateful callbacks and kept attributes of the Trainer have {size} bytes before compression. The "
                f"largest is {largest!r}. A commit has room for about {_BYTES_MAX} compressed bytes: if this is not "
                "enough, the commit drops the older halves of the longest lists, and fails if it still has no room. "
                "Keep fewer values in these callbacks and attributes"
            )

    def install(self, taken: dict[str, Any]) -> None:
        """Sets the fields and the log history of TrainerState to the values that `taken()` returned."""
        state = self._trainer.state
        for name, value in taken["state"].items():
            setattr(state, name, value)
        for name, value in taken["tensors"].items():
            fill(vars(state).setdefault(name, {}), _with_tensors(value))
        state.log_history[:] = taken["log_history"]

    def restore(self, taken: dict[str, Any], *, control: bool = True) -> None:
        """Sets all values that `taken()` returned.

        Without `control`, does not change TrainerControl, whose flags make the Trainer log, evaluate, save or stop.
        """
        trainer = self._trainer
        self.install(taken)
        for name, found in self._stateful():
            for one, packed_state in zip(found, taken["callbacks"].get(name, ()), strict=False):
                if one is trainer.control and not control:
                    continue
                state = unpacked(packed_state)
                for attribute, value in {**state.get("args", {}), **state.get("attributes", {})}.items():
                    setattr(one, attribute, value)
        for name, value in taken["sums"].items():
            setattr(trainer, name, restored(value, getattr(trainer, name)))
        for name, value in taken["averages"].items():
            fill(getattr(trainer, name), _with_tensors(value))
        for name in self._keep:
            if name in taken.get("kept", {}):
                replace(trainer, name, unpacked(taken["kept"][name]))
        if taken["scaler"] is not None:
            trainer.accelerator.scaler.load_state_dict(taken["scaler"])

    def _stateful(self) -> Iterator[tuple[str, list[Any]]]:
        """Yields the callbacks that export their state to checkpoints, as pairs: class name, callbacks of this class.

        TrainerControl is among these callbacks.
        """
        by_name: dict[str, list[Any]] = {}
        for one in (*self._trainer.callback_handler.callbacks, self._trainer.control):
            if isinstance(one, names.ExportableState):
                by_name.setdefault(type(one).__name__, []).append(one)
        return iter(by_name.items())


def _scaler_after(scaler: Any) -> dict[str, Any] | None:
    """Returns the state that the GradScaler will have after the current step; None if no scaler is enabled.

    accelerate calls the scaler's `update()` only after the commit.
    """
    if scaler is None or not scaler.is_enabled():
        return None
    state: dict[str, Any] = scaler.state_dict()
    state["_growth_tracker"] += 1
    if state["_growth_tracker"] == state["growth_interval"]:
        state |= {"scale": state["scale"] * state["growth_factor"], "_growth_tracker": 0}
    return state


def _summed(value: Any) -> Any:
    """Converts a number or scalar tensor, or nested dicts and lists of these, to JSON.

    In a list longer than `_NUMBERS_MAX`, sets the first entry to the sum of the list, and all other entries to 0. This
    also changes the Trainer's own list.
    """
    if isinstance(value, dict):
        return {name: _summed(part) for name, part in value.items()}
    if isinstance(value, list):
        if len(value) > _NUMBERS_MAX:
            value[:] = [sum(value), *[0.0] * (len(value) - 1)]
        return [_summed(part) for part in value]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype).removeprefix("torch."), value.item()]
    return plain(value)


def _are_tensors(value: Any) -> bool:
    """True if `value` is a dict whose values are all scalar tensors."""
    return isinstance(value, dict) and all(isinstance(one, torch.Tensor) and one.numel() == 1 for one in value.values())


def numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries whose values JSON can store. Converts scalars of numpy and torch to numbers."""
    found = {name: _number(value) for name, value in values.items()}
    return {name: plain(value) for name, value in found.items() if storable(value)}


def _number(value: Any) -> Any:
    """Converts a scalar of numpy or torch to a number; returns any other value as it is."""
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):
        # An array or a tensor of several elements.
        return value


def _with_tensors(value: Any) -> Any:
    """Converts the result of `_summed()` back to numbers and tensors."""
    if isinstance(value, dict):
        return {name: _with_tensors(part) for name, part in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], str):
        return torch.tensor(value[1], dtype=getattr(torch, value[0]))
    if isinstance(value, list):
        return [_with_tensors(part) for part in value]
    return value
