"""Writes a run's output folder, one for all processes that train the model together."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.files import file_errors, is_empty, new_folder, put_in_place, sync
from memascend.errors import ConfigError, CorruptionError, RankError
from memascend.session.optimizer import session_of
from memascend.text import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from memascend.cli.train.model import Described
    from memascend.cli.train.settings import Settings
    from memascend.session.optimizer import OffloadedOptimizer

    _T = TypeVar("_T")


# How long ranks wait for each other while they look at data and model: they have about the same to read.
_TIMEOUT_SECONDS = 3600.0
_NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")


class Ranks(Closing):
    """The processes of one run, and which one this is.

    Micro-batch j W + r of a step is that of rank r in round j, of W ranks.

    Attributes:
        rank: the number of this process; 0 tells and writes.
        count: how many there are.
    """

    def __init__(self) -> None:
        """Meet those that torchrun started, if it did.

        Raises:
            ConfigError: they are several, and something else than torchrun started this one.
            RankError: they do not meet.
        """
        self.rank, self.count = 0, _number("WORLD_SIZE", 1)
        if self.count < 1:
            raise ConfigError(f"WORLD_SIZE is {self.count}, and must be at least 1: unset it")
        self._exchange: Any = None
        if self.count == 1:
            return
        missing = [name for name in _NEEDED if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {self.count}, and {missing[0]} is not set: start several ranks by torchrun "
                f"--nproc-per-node {self.count} -m memascend train, or unset WORLD_SIZE"
            )
        rank = _number("RANK", 0)
        if not 0 <= rank < self.count:
            raise ConfigError(f"RANK is {rank} of WORLD_SIZE {self.count}: start the ranks by torchrun")
        _number("MASTER_PORT", 0)
        # One process needs nothing of these.
        from memascend.distributed.control_plane import Exchange

        try:
            torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
            self._exchange = Exchange(_TIMEOUT_SECONDS)
        except RuntimeError as error:
            raise RankError(
                f"the {self.count} ranks of this run cannot connect ({error}): start all of them by torchrun, with a "
                "MASTER_ADDR that each reaches",
                ranks=(),
            ) from error
        self.rank = self._exchange.rank

    def of_this(self, settings: Settings) -> Settings:
        """The settings as this rank has them: each computes on a device of its own.

        Raises:
            ConfigError: they do not go with so many ranks.
        """
        if self.count == 1:
            return settings
        if settings.accumulate % self.count:
            raise ConfigError(
                f"--accumulate {settings.accumulate} is not divisible by {self.count} ranks, which share the batches "
                "of a step: give a multiple, or start another number of ranks"
            )
        device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device.startswith("cuda:"):
            raise ConfigError(f"--device {device} names one device for {self.count} ranks: give --device cuda")
        if device == "cuda":
            local = _number("LOCAL_RANK", 0)
            torch.cuda.set_device(local)
            device = f"cuda:{local}"
        return replace(settings, device=device)

    # --- whose is what -----------------------------------------------------------------

    def numbers(self, count: int) -> range:
        """The micro-batches of this rank among so many; all ranks have as many, the last ones of some are not there."""
        return range(self.rank, -(-count // self.count) * self.count, self.count)

    def in_order(self, mine: Sequence[float], count: int) -> list[float]:
        """What each of `count` micro-batches has, in their order; `mine` are those of `numbers()`."""
        told = self.everyone(list(mine))
        return [told[number % self.count][number // self.count] for number in range(count)]

    # --- talking -----------------------------------------------------------------------

    def everyone(self, mine: Any) -> list[Any]:
        """What each rank says, a JSON value, in the order of ranks."""
        return [mine] if self._exchange is None else list(self._exchange.everyone(mine))

    def together(self, do: Callable[[], _T]) -> _T:
        """Do what may fail. Where it does on one rank, all raise, and each says whose it was."""
        if self._exchange is None:
            return do()
        done: _T = self._exchange.together(do)
        return done

    def note(self, text: str) -> None:
        """Say something while there is no display yet: the first rank, on standard error."""
        if not self.rank and sys.stderr is not None:
            print(f"memascend train: {text}", file=sys.stderr, flush=True)

    def say(self, text: str, *, as_json: bool) -> None:
        """Say something when there is no display any more: the first rank; standard output may be for JSON alone."""
        if not self.rank:
            print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    def talk_through(self, optimizer: OffloadedOptimizer) -> None:
        """Talk as the run itself does from now on, so that what fails in one is heard in the other."""
        exchange = session_of(optimizer).figures
        if self._exchange is not None and exchange is not None:
            self._exchange.close()
            self._exchange = exchange

    def divide_nothing(self, model: torch.nn.Module) -> None:
        """Let gradients be sums: the loss is divided by the tokens of all ranks, as one process divides it."""
        if self.count > 1:
            from torch.distributed.fsdp import FSDPModule

            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)

    def close(self) -> None:
        """Leave the others."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        if self.count > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _number(name: str, default: int) -> int:
    """A number of the environment, as torchrun sets it."""
    value = os.environ.get(name) or default
    try:
        return int(value)
    except ValueError as error:
        raise ConfigError(
            f"the environment has {name}={value!r}, which is not a number: start ranks by torchrun, or unset it"
        ) from error


_RECORD = "memascend-train.json"
_NEW = f".{_RECORD}.new"
LOGS = "logs"
LOG = "log.jsonl"
# All options of the last start, as --config takes them.
_RESOLVED = "run.yaml"
_MERGED, _BEST = "merged", "best"
_FORMAT = 1
_RECORD_BYTES_MAX = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run is."""

    began: str  # when, as ISO 8601 has it
    steps: int  # of the whole run
    options: dict[str, Any]  # by flag, that decide the result
    machine: dict[str, Any]  # by flag, that do not
    digests: dict[str, str]  # of data and model
    versions: dict[str, str] = field(default_factory=dict)  # of what computes
    store: str | None = None  # which store holds it; None where none was whole yet
    saved: int | None = None  # the step of the model that is in the folder; None where there is none yet
    warmup_steps: int | None = None  # as the run began; None: an earlier version's, which has the part of `steps`
    evaluated: int | None = None  # the last step whose loss on --eval was told; None where there was none
    eval_loss: float | None = None  # that loss
    kept: tuple[int, ...] = ()  # the steps of the models in folders of their own
    best: float | None = None  # the loss of the model in the folder of the best one
    format: int = _FORMAT  # of this record

    @property
    def is_finished(self) -> bool:
        """Whether the folder holds the model of the last step."""
        return self.saved == self.steps


class Output:
    """The folder of a run, which the first rank reads and writes; it is there for that one alone."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        """Look whether one is there; nothing is changed. All ranks do so together.

        Raises:
            ConfigError: the folder holds something else.
            CorruptionError: its record is damaged.
        """
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100 - a link stays the link that was named
        self._ranks = ranks
        found = None if ranks.rank else self._found()
        told = ranks.everyone(None if found is None else asdict(found))[0]
        self.record = None if told is None else Record(**{**told, "kept": tuple(told["kept"])})

    def _found(self) -> Record | None:
        record = self._read()
        # What a killed process left of its first record is nothing.
        (self.folder / _NEW).unlink(missing_ok=True)
        if record is None and self.folder.exists() and not is_empty(self.folder):
            raise ConfigError(
                f"--output {self.folder} exists, and memascend train did not write it: name another folder"
            )
        return record

    @property
    def parent(self) -> Path:
        """The nearest folder above that is there already."""
        return next(above for above in self.folder.parents if above.is_dir())

    def _read(self) -> Record | None:
        path = self.folder / _RECORD
        if not path.is_file():
            return None
        with file_errors(path, "cannot be read"), path.open("rb") as file:
            text = file.read(_RECORD_BYTES_MAX)
        try:
            values = json.loads(text)
            if values["format"] != _FORMAT:
                raise ConfigError(
                    f"{path} has format {values['format']}, of another version of memascend: use that version"
                )
            return Record(**{**values, "kept": tuple(values.get("kept", ()))})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise CorruptionError(
                f"{path} is not a record of a run ({error}): name another --output", path=str(path)
            ) from error

    def begin(self, record: Record) -> None:
        """Make the folder, with what the run is."""
        self._ranks.together(lambda: self._begin(record))
        self.record = record

    def _begin(self, record: Record) -> None:
        if self._ranks.rank == 0:
            with file_errors(self.folder, "cannot be written"):
                self.folder.mkdir(parents=True, exist_ok=True)
            self._write(record)

    def change(self, **values: Any) -> None:
        """Change a part of the record."""
        assert self.record is not None
        changed = replace(self.record, **values)
        self._ranks.together(lambda: self._write(changed))
        self.record = changed

    def resolve(self, text: str) -> None:
        """Keep what the run was started with, for whoever looks, and as a file for --config."""
        self._ranks.together(lambda: None if self._ranks.rank else self._put_new(_RESOLVED, text))

    def give_up(self) -> None:
        """Take back what `begin` did."""
        self.record = None
        if self._ranks.rank:
            return
        for name in (_RECORD, _RESOLVED):
            (self.folder / name).unlink(missing_ok=True)
        if is_empty(self.folder):
            self.folder.rmdir()

    def _write(self, record: Record) -> None:
        if self._ranks.rank:
            return
        self._put_new(_RECORD, _text(record))

    def _put_new(self, name: str, text: str) -> None:
        new = self.folder / _NEW
        with file_errors(new, "cannot be written"):
            _put(new, text)
            new.rename(self.folder / name)
            sync(self.folder)

    def save(self, described: Described, optimizer: OffloadedOptimizer, tokenizer: Any, step: int, keep: int) -> None:
        """Put the model of a step in the place of the one before; whatever happens, one of them is there whole.

        The model is between two steps. The tokenizer is saved beside it. `keep` models stay, the newest, in folders of
        their own, and the one with the lowest loss on --eval.
        """
        assert self.record is not None
        before = self.record
        kept = tuple(sorted({*before.kept, step})[-keep:]) if keep else ()
        loss = before.eval_loss if before.evaluated == step else None
        is_best = keep > 0 and loss is not None and (before.best is None or loss < before.best)
        record = replace(before, saved=step, kept=kept, best=loss if is_best else before.best)
        dropped = {_checkpoint(one) for one in before.kept if one not in kept} | ({_BEST} if is_best else set())
        # It had the adapters of an earlier step.
        dropped.add(_MERGED)
        own = ([_checkpoint(step)] if keep else []) + ([_BEST] if is_best else [])

        def do_part() -> None:
            if self._ranks.rank:
                self._write_model(described, optimizer, None)
                return
            with new_folder(self.folder) as new:
                with file_errors(new, "cannot be written"):
                    self._write_model(described, optimizer, new)
                    tokenizer.save_pretrained(new)
                    _finish(new)
                    _link(new, own)
                    _put(new / _RECORD, _text(record))
                    self._keep_others(new, dropped)
                put_in_place(self.folder, new)

        self._ranks.together(do_part)
        self.record = record

    def _write_model(self, described: Described, optimizer: OffloadedOptimizer, new: Path | None) -> None:
        """Write what is trained; ranks do so together, and those after the first have no folder."""
        model = described.model
        if described.adapted:
            values = {name: _whole(p) for name, p in model.named_parameters() if p.requires_grad}
            if new is not None:
                model.save_pretrained(new, state_dict=values, save_embedding_layers=False)
        elif self._ranks.count > 1:
            session_of(optimizer).saving.save_weights(new)
        else:
            model.save_pretrained(new)

    @property
    def merged(self) -> Path:
        """The folder of the model with its adapters added."""
        return self.folder / _MERGED

    def merge(self, make: Callable[[Path], None]) -> None:
        """Let the merged model be made, where it is not there yet; it is there whole or not at all."""

        def do_part() -> None:
            if self._ranks.rank == 0 and not self.merged.exists():
                with new_folder(self.merged) as new:
                    make(new)
                    _finish(new)
                    put_in_place(self.merged, new)

        self._ranks.together(do_part)

    def _keep_others(self, new: Path, dropped: set[str]) -> None:
        """What is not of the model stays: logs, which somebody goes on writing to, and what users put there."""
        for path in self.folder.iterdir():
            if (new / path.name).exists() or path.name in dropped:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, new / path.name, symlinks=True, copy_function=os.link)
            else:
                os.link(path, new / path.name, follow_symlinks=False)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter; of a DTensor the rows of all ranks, which meet for them."""
    gather = getattr(parameter, "full_tensor", None)
    return parameter.detach() if gather is None else gather().detach()


def _checkpoint(step: int) -> str:
    return f"checkpoint-{step}"


def _link(new: Path, names: list[str]) -> None:
    """The files of a model under other folders, too: on storage they are there once."""
    files = [path for path in new.iterdir() if path.is_file()]
    for name in names:
        (new / name).mkdir()
        for path in files:
            os.link(path, new / name / path.name)


def _text(record: Record) -> str:
    return json.dumps(asdict(record), indent=2) + "\n"


def _finish(new: Path) -> None:
    """Flush the files, and let them be read by whoever may read the folder: safetensors makes its own 0600."""
    for path in new.rglob("*"):
        if path.is_file():
            path.chmod(stat.S_IMODE(new.stat().st_mode) & 0o666)
        sync(path)


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)
