"""Reports what a run holds in memory and moves: a table, a picture, and plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.drawing import IN_MEMORY, open_pyplot
from memascend.formatting import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from memascend.run.meter import Sample

_MIB = 1 << 20


@dataclass(frozen=True)
class Owner:
    """Memory of one kind: bytes held now, and the most that were held."""

    bytes: int
    peak: int


@dataclass(frozen=True)
class TorchBytes:
    """What the same training holds in memory without offloading, in bytes, but for activations, which are the same."""

    values: int
    state: int
    gradients: int

    @property
    def total(self) -> int:
        """All of it, at the end of a backward."""
        return self.values + self.state + self.gradients


@dataclass(frozen=True)
class AllRanks:
    """What all ranks together held and moved, up to the beginning of the last `step()`, in which they told each other.

    Attributes:
        count: how many there are.
        peak: of host memory, the sum of their peaks.
        read: bytes read from storage since `offload()` returned.
        written: bytes written to it since then.
    """

    count: int
    peak: int
    read: int
    written: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run held in memory, read, wrote and waited for since `offload()` returned. `str()` is a table.

    Attributes:
        owners: host memory by owner.
        budget: the limit in force, in bytes.
        object_bytes: of Python's and torch's objects for each parameter, about, which no budget can hold down.
        read: bytes read, by kind; "other" is the catalog and what was read out.
        held: bytes that were taken from held entries in memory, and not read.
        written: bytes written, by kind; "first values" were written by `offload()` itself.
        log_steps: so many steps of gradients of held entries may be in the store's log; 0: there is none.
        log_bytes: the room that it has on storage.
        log_wanted: how many steps it would have if there was room for them.
        unlogged: updates of held entries that the log had no room for, so that their entries were written whole.
        seconds: by stage; stages run beside each other, so they do not add up to "wall".
        steps: committed since `offload()` returned.
        units: how often a unit was read, was there already, and went.
        in_memory: what the same training holds in memory.
        samples: memory over the last step.
        device: memory of the device by owner, where that is not the host.
        device_budget: the limit in force there; 0 where the host computes.
        device_torch: all that torch holds there, the owners' and beside them activations and the user's own tensors.
        device_copies: why copies there and back are slower than they could be; None where they are not.
        ranks: of several ranks, what all have; everything else is this one's. None before their first step.
    """

    owners: dict[str, Owner]
    budget: int
    object_bytes: int
    read: dict[str, int]
    written: dict[str, int]
    held: int
    seconds: dict[str, float]
    steps: int
    units: dict[str, int]
    in_memory: TorchBytes
    samples: Sequence[Sample]
    log_steps: int = 0
    log_bytes: int = 0
    log_wanted: int = 0
    unlogged: int = 0
    device: dict[str, Owner] = field(default_factory=dict)
    device_budget: int = 0
    device_torch: Owner | None = None
    device_copies: str | None = None
    ranks: AllRanks | None = None

    @property
    def total(self) -> int:
        """Bytes of host memory that are held now."""
        return sum(owner.bytes for owner in self.owners.values())

    @property
    def peak(self) -> int:
        """At most so many were held: the sum of the owners' peaks."""
        return sum(owner.peak for owner in self.owners.values())

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values; "device" where that is not the host, "held" and "log" where entries are held.

        "ranks" where there are several. "log" has "wanted" where it is shorter, and "unlogged" where that is not 0.
        """
        there = {} if self.device_torch is None else {"device": _held(self.device, self.device_budget)}
        if self.device_torch is not None:
            there["device"]["torch"] = {"bytes": self.device_torch.bytes, "peak": self.device_torch.peak}
        return {
            "host": _held(self.owners, self.budget),
            **there,
            "read": dict(self.read),
            "written": dict(self.written),
            "seconds": dict(self.seconds),
            "steps": self.steps,
            "beside": {"Python objects": self.object_bytes},
            **({"held": self.held} if self.held else {}),
            **({"ranks": asdict(self.ranks)} if self.ranks is not None else {}),
            **({"log": self._log()} if self.log_wanted else {}),
        }

    def _log(self) -> dict[str, int]:
        shorter = {"wanted": self.log_wanted} if self.log_steps < self.log_wanted else {}
        unlogged = {"unlogged": self.unlogged} if self.unlogged else {}
        return {"steps": self.log_steps, "bytes": self.log_bytes, **shorter, **unlogged}

    def __str__(self) -> str:
        rows = [(name, bytes_shown(owner.bytes), bytes_shown(owner.peak)) for name, owner in self.owners.items()]
        rows.append(("all", bytes_shown(self.total), bytes_shown(self.peak)))
        saved = f", {self.in_memory.total / self.peak:.1f} times as much" if self.peak else ""
        here = self.units["hits"] + self.units["adopted"]
        beside = f"beside it Python's objects take about {bytes_shown(self.object_bytes)}"
        budget = f"The budget is {bytes_shown(self.budget)}; {beside}."
        in_memory = f"In memory the same training would hold {bytes_shown(self.in_memory.total)}{saved}."
        parts = [
            table(("host memory", "now", "peak"), rows),
            f"{budget}\n{in_memory}",
            *self._there(),
            self._traffic(),
            *self._kept_off(),
            table(("stage", "time"), [(name, seconds_shown(taken)) for name, taken in self.seconds.items()]),
            *self._of_all_ranks(),
            f"{self.steps} steps. Units were read {self.units['fetches']} times and were there already {here} times.",
        ]
        return "\n\n".join(parts)

    def _there(self) -> list[str]:
        """Memory of the device, where that is not the host."""
        if self.device_torch is None:
            return []
        owners = {**self.device, "all that torch holds": self.device_torch}
        rows = [(name, bytes_shown(owner.bytes), bytes_shown(owner.peak)) for name, owner in owners.items()]
        budget = f"The budget is {bytes_shown(self.device_budget)}, for all but what else torch holds."
        slower = [] if self.device_copies is None else [f"Copies are slower than they could be: {self.device_copies}."]
        return [table(("device memory", "now", "peak"), rows), "\n".join([budget, *slower])]

    def _kept_off(self) -> list[str]:
        """What held entries saved, where there are any."""
        said = []
        if self.held:
            each = f", {bytes_shown(self.held // self.steps)} for each step" if self.steps else ""
            said.append(f"Held entries kept {bytes_shown(self.held)} of reads off storage{each}.")
        if self.log_steps:
            room = bytes_shown(self.log_bytes)
            less = f" ({self.log_wanted} had no room)" if self.log_steps < self.log_wanted else ""
            said.append(f"Gradients of held entries go to a log of {self.log_steps} steps{less}, {room}.")
        elif self.log_wanted:
            said.append("Storage has no room for a log of their gradients: held entries are written whole each step.")
        if self.unlogged:
            said.append(f"{self.unlogged} updates found no room in it: their entries were written whole.")
        return [" ".join(said)] if said else []

    def _of_all_ranks(self) -> list[str]:
        """What several ranks have together."""
        if self.ranks is None:
            return []
        count, peak = self.ranks.count, bytes_shown(self.ranks.peak)
        moved = (
            f"read {bytes_shown(self.ranks.read)} and wrote {bytes_shown(self.ranks.written)}, up to the last step()"
        )
        return [f"This is one of {count} ranks. Together they held at most {peak}, {moved}."]

    def _traffic(self) -> str:
        rows = []
        for direction, kinds in (("read", self.read), ("written", self.written)):
            for kind, nbytes in kinds.items():
                if not nbytes:
                    continue
                once = kind == "first values" or not self.steps
                rows.append((direction, kind, bytes_shown(nbytes), "" if once else bytes_shown(nbytes // self.steps)))
        return table(("storage", "kind", "bytes", "for each step"), rows)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw host memory over the last step, by owner, next to what the same training holds in memory.

        Args:
            path: of the picture; its ending says of which kind it is.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        plt = open_pyplot()
        figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
        try:
            for axis in axes:
                self._draw(axis)
            axes[0].step(*self._in_memory_line(), where="post", color=IN_MEMORY, label="in memory")
            axes[0].set_title("Beside the same training in memory, without activations")
            axes[1].set_title("memascend alone, by owner")
            axes[1].axhline(self.budget / _MIB, color=IN_MEMORY, linestyle=":", label="budget")
            for axis in axes:
                axis.set_ylim(bottom=0)
                axis.margins(x=0)
                axis.set_xlabel("seconds of a step")
                axis.set_ylabel("MiB of host memory")
                axis.grid(alpha=0.3)
            handles = {label: handle for axis in axes for handle, label in zip(*_legend(axis), strict=True)}
            figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
            where = Path(path).expanduser()
            where.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(where, dpi=110)
        finally:
            plt.close(figure)

    def _draw(self, axis: Any) -> None:
        """What is held, owner upon owner; of the units' memory, what is lent and what is free apart."""
        seconds = [sample.seconds for sample in self.samples]
        layers: dict[str, list[float]] = {}
        for name, owner in self.owners.items():
            if name == "units":
                lent = [min(owner.bytes, sample.units) / _MIB for sample in self.samples]
                layers["units"] = lent
                layers["units, free"] = [owner.bytes / _MIB - used for used in lent]
            elif name == "gradients":
                layers[name] = [sample.gradients / _MIB for sample in self.samples]
            elif name == "held gradients":
                layers[name] = [sample.waiting / _MIB for sample in self.samples]
            elif owner.bytes:
                layers[name] = [owner.bytes / _MIB] * len(seconds)
        axis.stackplot(seconds, list(layers.values()), labels=list(layers), step="post", alpha=0.85)

    def _in_memory_line(self) -> tuple[list[float], list[float]]:
        always = self.in_memory.values + self.in_memory.state
        held = [(always + sample.arrived) / _MIB for sample in self.samples]
        return [sample.seconds for sample in self.samples], held


def _legend(axis: Any) -> tuple[list[Any], list[str]]:
    handles, labels = axis.get_legend_handles_labels()
    return handles, labels


def _held(owners: Mapping[str, Owner], budget: int) -> dict[str, Any]:
    """Memory as JSON values."""
    return {
        "total": sum(owner.bytes for owner in owners.values()),
        "peak": sum(owner.peak for owner in owners.values()),
        "budget": budget,
        "owners": {name: {"bytes": owner.bytes, "peak": owner.peak} for name, owner in owners.items()},
    }
