"""Computes the sizes of a run's store and its memory plan, from facts about model and optimizer. Imports no torch."""

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


# Chunks of host memory, {bytes: count}, through which units go from storage to a device. With chunks of this size, one
# Python thread is as fast as several drives.
UNIT_CHUNKS = {4 << 20: 4}
# Windows of host memory, {bytes: count}, through which gradients come from a device. The engine reads one window while
# the other window is filled. Each filled window needs a call of Python. A model with 7 B parameters has 14 GB of
# gradients in a step, and so about 3,400 calls, or 13,600 calls with windows of 1 MiB. A larger window would delay the
# first chunk of each gradient.
GRADIENT_WINDOWS = {4 << 20: 2}
# Chunks, {bytes: count}, through which checkpointed activations go to storage. Each chunk is one request to a drive.
# Eight chunks keep the drive busy.
ACTIVATION_CHUNKS = {1 << 20: 8}
# activations="host" allocates further chunks in groups of 64. Without a given budget it allocates at most 16 groups,
# which are 1 GiB.
ACTIVATION_GROUP, ACTIVATION_GROUPS = 64, 16


def file_of(path: str) -> Path:
    """Returns the path of the store's file: a file inside `path` if `path` is a folder or ends in "/", else `path`."""
    place = Path(path)
    return place / "memascend.store" if path.endswith("/") or place.is_dir() else place


def nearest(place: Path) -> Path:
    """Returns `place` if it exists, else the nearest parent folder that exists."""
    return next(path for path in (place, *place.absolute().parents) if path.exists())


def free_space_beside(paths: Sequence[str] | None, total_bytes: int) -> int | None:
    """Returns the bytes of storage that remain free beside a store of `total_bytes`; None if that is unknown.

    `paths` are the paths of the store, which may exist already; None: the store is a temporary file.
    """
    try:
        places = [file_of(path) for path in paths or (tempfile.gettempdir(),)]
        systems = [nearest(place).stat().st_dev for place in places]
        rooms = []
        for place, system in zip(places, systems, strict=True):
            if place.is_block_device():
                with place.open("rb") as device:
                    rooms.append(device.seek(0, os.SEEK_END))
                continue
            # Several files of the store on one file system share its free space.
            free = shutil.disk_usage(nearest(place)).free // systems.count(system)
            # The bytes of an existing file of the store count as free, since the run replaces or continues this file.
            there = (file.stat().st_size for file in (place, pending_file(place)) if file.is_file())
            rooms.append(free + next(there, 0))
    except OSError:
        return None
    return max(0, min(rooms) * len(rooms) - total_bytes)


def folders_of(options: Options) -> list[Path]:
    """Returns the folders for temporary files: `scratch=`, or the folders of the store's files.

    Returns no folder if there is no `scratch=`, and the store is temporary or only on raw devices.
    """
    if options.scratch is not None:
        return [Path(expanded(options.scratch))]
    files = [path for path in options.paths or () if not Path(path).is_block_device()]
    return list(dict.fromkeys(file_of(path).parent for path in files))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about the model, the optimizer and the options on which a plan depends."""

    options: Options
    units: tuple[Unit, ...]
    records: list[Record]  # the records of the store
    optimizer: str  # the name of the optimizer's class; several names if there are several optimizers
    gradient_bytes: Mapping[str, int]  # the bytes of each gradient, by the name of its trained parameter
    replayed: frozenset[str]  # the trained parameters whose updates can be replayed from logged gradients
    durability: Literal["step", "none"]
    staged: bool  # True if a device computes; units then reach the device through chunks of host memory
    unplaced: bool = False  # True if the store has no path yet, so that the free space is unknown
    streamed: Collection[str] = field(default_factory=frozenset)  # trained parameters that are never kept in RAM
    # `Requirements` describes the following fields. Here `whole_bytes` has only the bytes for whole parameters.
    whole_bytes: int = 0
    whole_next_bytes: int = 0
    update_values: Literal["resident", "read", "never"] = "resident"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The records and sizes of a run's store, and the plan of the run's memory."""

    records: list[Record]  # the records of the store
    sizes: engines.Sizes  # the sizes of the store and its parts
    plan: Plan  # the memory plan
    # The network traffic of one rank, if `session.decide.planned` plans several ranks; else None.
    network: Network | None = None


@dataclass(frozen=True)
class TorchBytes:
    """The bytes of memory that the same training takes without offloading; activations are not included."""

    values: int
    state: int
    gradients: int

    @classmethod
    def of(cls, decision: Decision) -> TorchBytes:
        """Computes the bytes from the records in `decision`."""
        own = [record for record in decision.records if not record.buffer]
        # Only the records of trained parameters have a `spill` that is not None.
        gradients = sum(record.values.nbytes for record in own if record.spill is not None)
        state = sum(
            # The state "rest" is the low half of an fp32 master weight. torch would keep all 4 bytes of the master
            # weight.
            tensor.numel() * (4 if name == "rest" else tensor.element_size())
            for record in decision.records
            for name, tensor in record.state.items()
        )
        return cls(sum(record.values.nbytes for record in own), state, gradients)

    @property
    def total(self) -> int:
        """The bytes of values, state and gradients together. All of them exist at the end of a backward."""
        return self.values + self.state + self.gradients


def decided(facts: Facts) -> Decision:
    """Computes the sizes of the store and the memory plan of a run.

    Raises:
        ConfigError: an option is impossible on this storage, or a unit has no elements.
        BudgetError: `host_memory` or `device_memory` is too small.
    """
    options, records = facts.options, facts.records
    moves = options.moves_activations(staged=facts.staged)
    if moves and options.paths and not folders_of(options):
        raise ConfigError(
            f"activations={options.activations!r} needs files, but the storage is a raw device: pass a folder as "
            "offload(scratch=)"
        )
    sizes = engines.sizes(records, optimizer=facts.optimizer, devices=max(1, len(options.paths or ())))
    empty = next((unit for unit in facts.units if sizes.unit_bytes[unit.name] == 0), None)
    if empty is not None:
        raise ConfigError(
            f"these parameters have no elements, and share no module with others: {', '.join(empty.parameters)}. "
            "Remove them from the model, or move them into a module that has other parameters"
        )
    plan = _planned(facts, _requirements(facts, sizes))
    if options.log_steps is not None and plan.log_steps < plan.log_wanted:
        # This is an error only with `log_steps=`. Without `log_steps=`, the run uses a shorter log or no log.
        fits = f"log_steps={plan.log_steps} fits" if plan.log_steps else "not one step fits (pass log_steps=0)"
        raise ConfigError(
            f"the disk has too little free space for a gradient log of {options.log_steps} steps: {fits}; free disk "
            "space, pass a smaller log_steps, or remove log_steps"
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
    # On a raw device, the log may use all free space. On a file system, the log shares the free space with other files.
    shares = any(not Path(path).is_block_device() for path in options.paths or ())
    room = None if facts.unplaced else free_space_beside(options.paths, sizes.total_bytes)
    return Log(facts.replayed, nbytes, options.log_steps, room, shares=shares)
