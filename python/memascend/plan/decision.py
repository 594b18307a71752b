"""Decides the layout and the plan of a run from facts about a model and its optimizer; needs no torch."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from memascend import storage as engines
from memascend.errors import ConfigError
from memascend.plan.memory_plan import Log, Requirements, make_plan
from memascend.plan.spare import with_spare
from memascend.storage import pending_file
from memascend.text import expanded

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from memascend.plan.cost import Network
    from memascend.plan.options import Options
    from memascend.plan.table import Plan
    from memascend.plan.units import Unit
    from memascend.storage import Record


# Chunks between a device and storage, {bytes: count}, of units and of gradients. Large enough that a thread of Python
# keeps up with several drives.
UNIT_CHUNKS = {4 << 20: 4}
# One is used, one is filled. Each asks Python once: a step of 7 B parameters has 14 GB of gradients, so 3,400 windows
# of this size, where 1 MiB took 13,600. Larger ones keep the first chunk of each gradient waiting.
GRADIENT_WINDOWS = {4 << 20: 2}
# Chunks of checkpointed activations, {bytes: count}. One request of a storage device each, and as many as keep it busy
# (docs/measurements.md).
ACTIVATION_CHUNKS = {1 << 20: 8}
# Chunks that "host" takes at once where it needs further ones, and how often without a budget: 1 GiB.
ACTIVATION_GROUP, ACTIVATION_GROUPS = 64, 16


def file_of(path: str) -> Path:
    """The store's file in a folder (or a folder to be made: "runs/first/"); of any other path, the path itself."""
    place = Path(path)
    return place / "memascend.store" if path.endswith("/") or place.is_dir() else place


def nearest(place: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(path for path in (place, *place.absolute().parents) if path.exists())


def room_beside(paths: Sequence[str] | None, total_bytes: int) -> int | None:
    """Free bytes on storage beside a store of `total_bytes`, made or not; None where the system does not say."""
    try:
        places = [file_of(path) for path in paths or (tempfile.gettempdir(),)]
        systems = [nearest(place).stat().st_dev for place in places]
        rooms = []
        for place, system in zip(places, systems, strict=True):
            if place.is_block_device():
                with place.open("rb") as device:
                    rooms.append(device.seek(0, os.SEEK_END))
                continue
            # Several shards on one file system share its free space.
            free = shutil.disk_usage(nearest(place)).free // systems.count(system)
            # A new store takes over the bytes of a store's file, whether or not it was ever filled.
            there = (file.stat().st_size for file in (place, pending_file(place)) if file.is_file())
            rooms.append(free + next(there, 0))
    except OSError:
        return None
    return max(0, min(rooms) * len(rooms) - total_bytes)


def folders_of(options: Options) -> list[Path]:
    """The folders of temporary files: beside each shard of the store, as far as that is known."""
    if options.scratch is not None:
        return [Path(expanded(options.scratch))]
    files = [path for path in options.paths or () if not Path(path).is_block_device()]
    return list(dict.fromkeys(file_of(path).parent for path in files))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a plan depends on, of the model, its optimizer and the options."""

    options: Options
    units: tuple[Unit, ...]
    records: list[Record]  # the records of the store
    optimizer: str  # its class, or its classes
    gradient_bytes: Mapping[str, int]  # by the names of the trained parameters
    replayed: frozenset[str]  # the trained parameters whose updates can be replayed from their gradients
    durability: Literal["step", "none"]
    staged: bool  # units reach a device through chunks
    unplaced: bool = False  # the path of the store is not known yet, nor the free space beside it
    streamed: Collection[str] = field(default_factory=frozenset)  # the trained parameters that no budget keeps in RAM
    # See `Requirements`.
    whole_bytes: int = 0
    whole_next_bytes: int = 0
    update_values: Literal["resident", "read", "never"] = "resident"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The layout of a run."""

    records: list[Record]  # the parameter records of the store
    sizes: engines.Sizes  # their sizes there
    plan: Plan  # of memory
    network: Network | None = None  # the planned traffic of one of several ranks


@dataclass(frozen=True)
class TorchBytes:
    """Bytes that the same training takes without offloading, but for activations, which are the same."""

    values: int
    state: int
    gradients: int

    @classmethod
    def of(cls, decision: Decision) -> TorchBytes:
        """Those of a run, which reserves space for the gradients of trained parameters."""
        own = [record for record in decision.records if not record.buffer]
        gradients = sum(record.values.nbytes for record in own if record.spill is not None)
        state = sum(
            # "rest" is one half of a compact master, which counts whole.
            tensor.numel() * (4 if name == "rest" else tensor.element_size())
            for record in decision.records
            for name, tensor in record.state.items()
        )
        return cls(sum(record.values.nbytes for record in own), state, gradients)

    @property
    def total(self) -> int:
        """The sum, at the end of a backward."""
        return self.values + self.state + self.gradients


def decided(facts: Facts) -> Decision:
    """Size the store, and plan the memory of the run."""
    options, records = facts.options, facts.records
    moves = options.moves_activations(staged=facts.staged)
    if moves and options.paths and not folders_of(options):
        raise ConfigError(
            f"the storage is a raw device: give offload(scratch=) a folder for activations={options.activations!r}"
        )
    sizes = engines.sizes(records, optimizer=facts.optimizer, devices=max(1, len(options.paths or ())))
    empty = next((unit for unit in facts.units if sizes.unit_bytes[unit.name] == 0), None)
    if empty is not None:
        raise ConfigError(
            f"{', '.join(empty.parameters)} has no elements, and stands alone: leave it out of the model, or put it "
            "into a module that has other parameters"
        )
    plan = _planned(facts, _requirements(facts, sizes))
    if options.log_steps is not None and plan.log_steps < plan.log_wanted:
        # Only a number that was asked for is rejected; by default the log is as long as the space allows.
        fits = f"log_steps={plan.log_steps} fits" if plan.log_steps else "not one step fits (log_steps=0 goes without)"
        raise ConfigError(
            f"there is no disk space beside the store for a gradient log of {options.log_steps} steps: {fits}; free "
            "disk space, or leave log_steps out"
        )
    return Decision(records=records, sizes=sizes, plan=plan)


def _planned(facts: Facts, run: Requirements) -> Plan:
    options = facts.options

    def made(budget: int | None) -> Plan:
        return make_plan(run, budget=budget, device_budget=options.device_bytes)

    if options.spare is None:
        return made(options.host_bytes)
    return with_spare(made, options.spare.budget(on_host=not facts.staged))


def _requirements(facts: Facts, sizes: engines.Sizes) -> Requirements:
    options = facts.options
    moves = options.moves_activations(staged=facts.staged)
    stays = moves and options.activations == "host"
    return Requirements(
        units=facts.units,
        sizes=sizes,
        gradients="ssd" if options.gradients == "auto" and options.keeps else options.gradients,
        whole_bytes=facts.whole_bytes + sizes.other_bytes,
        whole_next_bytes=facts.whole_next_bytes,
        staging={"unit staging": UNIT_CHUNKS, "gradient windows": GRADIENT_WINDOWS} if facts.staged else None,
        activation_chunks=ACTIVATION_CHUNKS if moves else {},
        activation_group=ACTIVATION_GROUP if stays else 0,
        activation_groups=ACTIVATION_GROUPS if stays else 0,
        update_values=facts.update_values,
        gradient_bytes=facts.gradient_bytes,
        streamed=facts.streamed,
        deferrable=facts.replayed,
        places=partial(engines.places_bytes, facts.records),
        applied=facts.replayed if facts.durability == "none" else (),
        log=_log(facts, sizes),
    )


def _log(facts: Facts, sizes: engines.Sizes) -> Log | None:
    options = facts.options
    if facts.durability == "none":
        return None
    nbytes = engines.log_bytes(facts.records)
    # A raw device is the store's alone.
    shares = any(not Path(path).is_block_device() for path in options.paths or ())
    room = None if facts.unplaced else room_beside(options.paths, sizes.total_bytes)
    return Log(facts.replayed, nbytes, options.log_steps, room, shares=shares)
