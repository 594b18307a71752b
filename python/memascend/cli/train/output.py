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
from memascend.checkpoint.weights import misread_names
from memascend.errors import ConfigError, CorruptionError, MemascendError, RankError
from memascend.session.optimizer import session_of
from memascend.text import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from memascend.cli.train.model import Described
    from memascend.cli.train.settings import Settings
    from memascend.session.optimizer import OffloadedOptimizer

    _T = TypeVar("_T")


# Ranks wait for each other so long while they read data and model, which takes all of them about as long.
_TIMEOUT_SECONDS = 3600.0


class Ranks(Closing):
    """The processes (ranks) of one run.

    With W ranks, rank r computes micro-batch j W + r of a step in round j.

    Attributes:
        rank: the number of this process; rank 0 logs and writes.
        count: the number of ranks.
    """

    def __init__(self) -> None:
        """Connect to the other ranks if torchrun started several.

        Raises:
            ConfigError: the environment names several ranks and is not torchrun's.
            RankError: the ranks cannot connect.
        """
        self.rank, self.count = 0, _number("WORLD_SIZE", 1)
        self._exchange: Any = None
        if self.count == 1:
            return
        start = "start several ranks by torchrun --nproc-per-node N -m memascend train, or unset WORLD_SIZE"
        # torch would wait for ranks that do not exist.
        if not 0 <= (rank := _number("RANK", 0)) < self.count:
            raise ConfigError(f"RANK is {rank} of WORLD_SIZE {self.count}: {start}")
        # A single process does not need this import.
        from memascend.distributed.control_plane import Exchange
        from memascend.distributed.rendezvous import meet

        distributed: Any = torch.distributed
        try:
            store, rank, count = next(distributed.rendezvous("env://"))
            # torch's own groups have the keys of the attempt before, too, which torchrun leaves in its store.
            prefix = meet(store, rank, count, _TIMEOUT_SECONDS)
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            fresh = distributed.PrefixStore(prefix, store)
            distributed.init_process_group(backend, store=fresh, rank=rank, world_size=count)
            self._exchange = Exchange(_TIMEOUT_SECONDS)
        except MemascendError:
            raise
        except (RuntimeError, ValueError) as error:
            raise RankError(f"the {self.count} ranks of this run cannot connect: {error}; {start}", ranks=()) from error
        self.rank = self._exchange.rank

    def of_this(self, settings: Settings) -> Settings:
        """The settings of this rank, with its own device.

        Raises:
            ConfigError: the settings do not suit this number of ranks.
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

    # --- micro-batches -----------------------------------------------------------------

    def numbers(self, count: int) -> range:
        """The micro-batches of this rank among `count`. All ranks get as many; numbers from `count` on are padding."""
        return range(self.rank, -(-count // self.count) * self.count, self.count)

    def in_order(self, mine: Sequence[float], count: int) -> list[float]:
        """The values of `count` micro-batches in their order; `mine` are the values of `numbers()`."""
        told = self.everyone(list(mine))
        return [told[number % self.count][number // self.count] for number in range(count)]

    # --- communication -----------------------------------------------------------------

    def everyone(self, mine: Any) -> list[Any]:
        """Gather a JSON value from each rank, in the order of ranks."""
        return [mine] if self._exchange is None else list(self._exchange.everyone(mine))

    def together(self, do: Callable[[], _T]) -> _T:
        """Call `do` on all ranks. If it fails on one rank, all raise, with that rank's number."""
        if self._exchange is None:
            return do()
        done: _T = self._exchange.together(do)
        return done

    def say(self, text: str, *, as_json: bool) -> None:
        """Print on rank 0; with `as_json`, standard output is for JSON alone."""
        if not self.rank:
            print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    def talk_through(self, optimizer: OffloadedOptimizer) -> None:
        """Communicate through the run's own exchange from now on, so that a failure of either reaches both."""
        exchange = session_of(optimizer).figures
        if self._exchange is not None and exchange is not None:
            self._exchange.close()
            self._exchange = exchange

    def divide_nothing(self, model: torch.nn.Module) -> None:
        """Make gradients sums over ranks: the loss is already divided by the tokens of all ranks."""
        if self.count > 1:
            from torch.distributed.fsdp import FSDPModule

            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)

    def close(self) -> None:
        """Disconnect from the other ranks."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        if self.count > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _number(name: str, default: int) -> int:
    """A number in an environment variable that torchrun sets."""
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
# All options of the last start, in the format of --config.
_RESOLVED = "run.yaml"
_MERGED, _BEST = "merged", "best"
_FORMAT = 1
_RECORD_BYTES_MAX = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of a run in its folder."""

    began: str  # time of the first start, in ISO 8601
    steps: int  # of the whole run
    options: dict[str, Any]  # the options that decide the result, by flag
    digests: dict[str, str]  # of data and model
    warmup_steps: int  # at the first start
    versions: dict[str, str] = field(default_factory=dict)  # of memascend, torch and transformers
    store: str | None = None  # the store of the training state; None: none is complete yet
    saved: int | None = None  # the step of the saved model; None: no model is saved yet
    evaluated: int | None = None  # the last step whose loss on --eval was reported
    eval_loss: float | None = None  # that loss
    kept: tuple[int, ...] = ()  # the steps of the models in checkpoint-STEP
    best: float | None = None  # the loss of the model in best/
    format: int = _FORMAT  # of this record


class Output:
    """The folder of a run. Rank 0 alone reads and writes it; other ranks may not see it."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        """Read the record of the folder, if there is one; all ranks do so together.

        Raises:
            ConfigError: the folder holds something else.
            CorruptionError: its record is damaged.
        """
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100 - keeps symbolic links
        self._ranks = ranks
        found = None if ranks.rank else self._found()
        told = ranks.everyone(None if found is None else asdict(found))[0]
        self.record = None if told is None else _record(told)

    def copies(self, left: int, keep: int, *, finds_best: bool) -> int:
        """How many more saved models the folder will have at once, with so many saves left."""
        if not left:
            return 0
        record = self.record
        present = 0 if record is None or record.saved is None else len(record.kept) + (record.best is not None) or 1
        # A new model is written while the one before it, or those that are kept, are still there.
        most = keep + 1 + finds_best if keep else 2
        return max(1, min(present + left, most) - present)

    def _found(self) -> Record | None:
        record = self._read()
        # A killed process may have left an unfinished record.
        (self.folder / _NEW).unlink(missing_ok=True)
        if record is None and self.folder.exists() and not is_empty(self.folder):
            raise ConfigError(
                f"--output {self.folder} exists, and memascend train did not write it: name another folder"
            )
        return record

    @property
    def parent(self) -> Path:
        """The nearest existing folder above."""
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
            return _record(values)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise CorruptionError(
                f"{path} is not a record of a run ({error}): name another --output", path=str(path)
            ) from error

    def begin(self, record: Record) -> None:
        """Make the folder with its record."""
        self._put_new(_RECORD, _text(record))
        self.record = record

    def change(self, **values: Any) -> None:
        """Change fields of the record."""
        assert self.record is not None
        changed = replace(self.record, **values)
        self._put_new(_RECORD, _text(changed))
        self.record = changed

    def resolve(self, text: str) -> None:
        """Write the options of this start into the folder, as a file for --config."""
        self._put_new(_RESOLVED, text)

    def give_up(self) -> None:
        """Undo `begin`."""
        self.record = None
        if self._ranks.rank:
            return
        for name in (_RECORD, _RESOLVED):
            (self.folder / name).unlink(missing_ok=True)
        if is_empty(self.folder):
            self.folder.rmdir()

    def _put_new(self, name: str, text: str) -> None:
        """Replace a file of the folder at once; all ranks do so together."""

        def put() -> None:
            if self._ranks.rank:
                return
            new = self.folder / _NEW
            with file_errors(new, "cannot be written"):
                self.folder.mkdir(parents=True, exist_ok=True)
                _put(new, text)
                new.rename(self.folder / name)
                sync(self.folder)

        self._ranks.together(put)

    def save(self, described: Described, optimizer: OffloadedOptimizer, tokenizer: Any, step: int, keep: int) -> None:
        """Replace the saved model by the current one, at once; after a crash one of them is complete.

        The newest `keep` models stay in folders of their own, and so does the one with the lowest loss on --eval.
        """
        assert self.record is not None
        before = self.record
        kept = tuple(sorted({*before.kept, step})[-keep:]) if keep else ()
        loss = before.eval_loss if before.evaluated == step else None
        is_best = keep > 0 and loss is not None and (before.best is None or loss < before.best)
        record = replace(before, saved=step, kept=kept, best=loss if is_best else before.best)
        own = ([f"checkpoint-{step}"] if keep else []) + ([_BEST] if is_best else [])
        # The merged model has the adapters of an earlier step.
        dropped = {f"checkpoint-{one}" for one in before.kept if one not in kept} | {_MERGED, *own}

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
        """Write the trained weights; all ranks do so together, and only rank 0 has a folder."""
        model = described.model
        if described.adapted:
            values = {name: _whole(p) for name, p in model.named_parameters() if p.requires_grad}
            if new is not None:
                model.save_pretrained(new, state_dict=values, save_embedding_layers=False)
        elif self._ranks.count > 1 or not misread_names(model):
            # The same bytes for any number of ranks.
            session_of(optimizer).saving.save_weights(new)
        else:
            model.save_pretrained(new)

    @property
    def merged(self) -> Path:
        """The folder of the model merged with its adapters."""
        return self.folder / _MERGED

    def merge(self, make: Callable[[Path], None]) -> None:
        """Make the merged model if there is none yet; it appears complete or not at all."""

        def do_part() -> None:
            if self._ranks.rank == 0 and not self.merged.exists():
                with new_folder(self.merged) as new:
                    with file_errors(new, "cannot be written"):
                        make(new)
                        _finish(new)
                    put_in_place(self.merged, new)

        self._ranks.together(do_part)

    def _keep_others(self, new: Path, dropped: set[str]) -> None:
        """Keep files that are not the model's: logs that are being written, and files of the user."""
        for path in self.folder.iterdir():
            if (new / path.name).exists() or path.name in dropped:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, new / path.name, symlinks=True, copy_function=os.link)
            else:
                os.link(path, new / path.name, follow_symlinks=False)


def _record(values: dict[str, Any]) -> Record:
    """The record of these JSON values."""
    return Record(**{**values, "kept": tuple(values["kept"])})


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter; a DTensor is gathered from all ranks."""
    gather = getattr(parameter, "full_tensor", None)
    return parameter.detach() if gather is None else gather().detach()


def _link(new: Path, names: list[str]) -> None:
    """Hard-link the files of a model into other folders."""
    files = [path for path in new.iterdir() if path.is_file()]
    for name in names:
        (new / name).mkdir()
        for path in files:
            os.link(path, new / name / path.name)


def _text(record: Record) -> str:
    return json.dumps(asdict(record), indent=2) + "\n"


def _finish(new: Path) -> None:
    """Flush the files, and give them the folder's read permissions: safetensors creates files with mode 0600."""
    for path in new.rglob("*"):
        if path.is_file():
            path.chmod(stat.S_IMODE(new.stat().st_mode) & 0o666)
        sync(path)


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)
