"""Decides how a run begins: anew, where it ended, or not at all; nothing is changed before that is known."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memascend.cli.train.settings import OF_THE_END, with_defaults
from memascend.engine import look
from memascend.errors import ConfigError, StorageError
from memascend.ranks.places import candidates
from memascend.run.locations import file_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.cli.train.output import Output, Record
    from memascend.cli.train.ranks import Ranks

# Of a weights file: its header is there, and values that no other model has.
_SAMPLE_BYTES = 1 << 20
_ANEW = (
    "to begin a run of its own, name another --output and another --storage (with --model {output}, from its weights)"
)


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What to do."""

    existing: Literal["refuse", "replace", "resume", "previous"] | None  # for `offload()`; None: the store is gone
    next_step: int = 0  # the data's, counted from 0


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What a store says."""

    uuid: str  # which store it is
    run: str | None  # which run's, where it was trained. Another number of ranks has other stores of the same run.
    output: str | None  # its folder
    step: int  # committed
    next_step: int  # the data's
    used: bool  # whether anybody left something of his own in it
    files: tuple[str, ...]  # that it lies in

    def is_of(self, record: Record) -> bool:
        return record.store in (self.uuid, self.run)


def find_beginning(output: Output, storage: tuple[str, ...], ranks: Ranks, *, previous: bool = False) -> Beginning:
    """Look at the folder and at the storage; all ranks do so together, and find the same.

    Raises:
        ConfigError: one of them is of another run.
        StorageError: a store is there and cannot be opened.
    """
    record = output.record
    if previous and (record is None or record.store is None):
        raise ConfigError(f"--previous goes on with a run that is there, and {output.folder} holds none that was begun")
    if record is None:
        return _first(output, storage, ranks)
    if record.store is None:
        # Nothing of this run was ever trained: whatever of its store is there was not whole yet.
        found = _look(storage, ranks, unfinished=True)
        if found is not None and (found.step or found.used):
            raise _foreign(storage, found, output)
        return Beginning(existing="replace")
    found = _look(storage, ranks)
    if found is None and record.is_finished:
        return Beginning(existing=None, next_step=record.steps)
    if found is None:
        raise gone(output, storage)
    if not found.is_of(record):
        raise _foreign(storage, found, output)
    return Beginning(existing="previous" if previous else "resume", next_step=found.next_step)


def gone(output: Output, storage: tuple[str, ...]) -> ConfigError:
    """The error of a run that has steps to do, and no training state."""
    return ConfigError(
        f"the training state of {output.folder} is not at {_named(storage)}: give the --storage that the run has, "
        f"or {_ANEW.format(output=output.folder)}"
    )


def files_of_run(output: Output, storage: tuple[str, ...], ranks: Ranks) -> list[str]:
    """The files and devices that hold the run's training state: they, and nothing beside them, are the run's."""
    record = output.record
    assert record is not None
    own: set[str] = set()
    # One rank after the other: several may see the same store, and who looks at it locks it.
    for number in range(ranks.count):
        for place in candidates(storage, ranks.rank, ranks.count) if number == ranks.rank else []:
            with contextlib.suppress(StorageError):
                found = _look_at(place, unfinished=True)
                if found is not None and found.is_of(record):
                    own.update(found.files)
        ranks.everyone(None)
    return sorted({file for one in ranks.everyone(sorted(own)) for file in one})


def said_of_files(files: list[str]) -> str:
    """What may be done with them, once the run is over."""
    if not files:
        return ""
    devices = [file for file in files if Path(file).is_block_device()]
    others = [file for file in files if file not in devices]
    said = ""
    if others:
        verb = "is its training state, and can" if len(others) == 1 else "are its training state, and can"
        said += f"; {', '.join(others)} {verb} be removed where no more epochs are wanted"
    if devices:
        said += f"; its training state is on {', '.join(devices)}, which may be used for something else"
    return said


def _first(output: Output, storage: tuple[str, ...], ranks: Ranks) -> Beginning:
    try:
        found = _look(storage, ranks)
    except StorageError:
        # On a device, only offload() tells none from a foreign one; it refuses both a store and what is foreign.
        if any(Path(path).is_block_device() for path in storage):
            return Beginning(existing="refuse")
        raise
    if found is not None:
        raise _foreign(storage, found, output)
    return Beginning(existing="refuse")


def _look(storage: tuple[str, ...], ranks: Ranks, *, unfinished: bool = False) -> _Found | None:
    """What the store says that the first rank sees of those that have one, of whatever number of ranks."""
    # One after the other: several may see the same store, and who looks at it locks it.
    for number in range(ranks.count):
        own = _look_at_own(storage, ranks, unfinished=unfinished) if number == ranks.rank else None
        told = ranks.everyone(None if own is None else asdict(own))[number]
        if told is not None:
            return _Found(**{**told, "files": tuple(told["files"])})
    return None


def _look_at_own(storage: tuple[str, ...], ranks: Ranks, *, unfinished: bool) -> _Found | None:
    refused: StorageError | None = None
    for place in candidates(storage, ranks.rank, ranks.count):
        try:
            found = _look_at(place, unfinished=unfinished)
        except StorageError as error:
            # New stores that are being filled from those of another number of ranks are not whole.
            refused = refused or error
            continue
        if found is not None:
            return found
    if refused is not None:
        raise refused
    return None


def _look_at(places: list[str], *, unfinished: bool) -> _Found | None:
    """What the store at these paths says; None where there is none, and with `unfinished` where it is not whole."""
    files = [file_of(path) for path in places]
    if not any(file.is_block_device() or (file.is_file() and file.stat().st_size) for file in files):
        return None
    try:
        # What is looked at stays as it is to the byte: it may be another's.
        with look(places) as store:
            state = store.user_state
            position: dict[str, Any] = state if isinstance(state, dict) else {}
            run, output, next_step = (position.get(name) for name in ("run", "output", "next_step"))
            return _Found(
                uuid=store.info()["uuid"],
                run=run if isinstance(run, str) else None,
                output=output if isinstance(output, str) else None,
                step=store.step,
                next_step=next_step if isinstance(next_step, int) else 0,
                used=state is not None,
                files=tuple(str(file) for file in files),
            )
    except StorageError as error:
        # With a number the system refused it: in use, not readable. Without one it is no whole store.
        if unfinished and error.errno is None:
            return None
        raise


def _foreign(storage: tuple[str, ...], found: _Found, output: Output) -> ConfigError:
    of = f"the run of --output {found.output}" if found.output else f"another run (step {found.step})"
    return ConfigError(
        f"--storage {_named(storage)} holds the training state of {of}, and not that of {output.folder}: name another "
        f"--storage, or remove {', '.join(found.files)} if nothing in it is needed"
    )


def _named(storage: tuple[str, ...]) -> str:
    return " ".join(storage)


def require_same(
    record: Record, options: Mapping[str, Any], digests: Mapping[str, str], output: Path, *, steps: int, done: int
) -> None:
    """Refuse options that decide the result and are others than at the beginning.

    Where the rate stays, a run may have more or fewer steps than it began with.

    Args:
        record: what the run is.
        options: that are given now.
        digests: of the model and the data that are given now.
        output: the folder.
        steps: that these options make.
        done: that are committed.

    Raises:
        ConfigError: some are; it lists them and says what to do.
    """
    changed = changes(with_defaults(record.options), options)
    of_the_end = changed and all(change.split()[0] in OF_THE_END for change in changed)
    if digests.get("model") != record.digests.get("model"):
        changed.append("--model: another configuration or other weights")
    if digests.get("data") != record.digests.get("data"):
        changed.append("--data: other tokens (another file, tokenizer or chat template)")
    if not changed:
        return
    if of_the_end and len(changed) <= len(OF_THE_END) and options["--schedule"] == "constant":
        if steps >= done:
            return
        raise ConfigError(
            f"the run in {output} has done {done} steps already, and {'; '.join(changed)} ends at {steps}"
        )
    why = ""
    if of_the_end:
        why = (
            f"With --schedule {options['--schedule']} the rate of each step depends on how many there are, and {done} "
            "are done with other rates; under --schedule constant a run goes on as long as is wanted. "
        )
    raise ConfigError(
        f"the run in {output} goes on only as it began, and these changed: {'; '.join(changed)}. {why}Give what it "
        f"began with, or {_ANEW.format(output=output)}"
    )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, in words."""
    return [
        f"{name} {_shown(before.get(name))} -> {_shown(value)}"
        for name, value in now.items()
        if before.get(name) != value
    ]


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def model_digest(folder: Path) -> str:
    """Of configuration and weights: all bytes of what is small, samples of what is large."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        if not path.is_file():
            continue
        nbytes = path.stat().st_size
        digest.update(f"{path.name}\0{nbytes}\0".encode())
        with path.open("rb") as file:
            for start in sorted({0, nbytes // 2, max(0, nbytes - _SAMPLE_BYTES)}):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
