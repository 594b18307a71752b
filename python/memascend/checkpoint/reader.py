"""Reads and verifies checkpoints, and supplies the first values of a store from a checkpoint."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.contents import UPDATES, StateForm, conversion_warning, form_of, kinds_of, plain_tensors
from memascend.checkpoint.files import Names, file_errors, read_bounded, saved_name
from memascend.checkpoint.weights import WeightFiles
from memascend.distributed.rows import is_in_blocks
from memascend.errors import ConfigError, CorruptionError, MemascendError
from memascend.optim.members import is_owners, is_roster, title_of
from memascend.params.offloaded_param import dense_strides
from memascend.storage import Checksum, checksum_of, order_of
from memascend.tensors import laid_out, strides_of
from memascend.text import Progress, listed, warn

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Mapping, Sequence

    from memascend.checkpoint.init import First
    from memascend.distributed.rows import Layout, Partition
    from memascend.plan.units import Unit
    from memascend.session.decide import Subject


# The subfolder for optimizer state and manifest. State needs a subfolder, because many tools load every safetensors
# file in the weights' folder as weights.
FOLDER = "memascend"
MANIFEST = "manifest.json"
FORMAT = "memascend checkpoint"
VERSION = 2
_READ_BYTES = 8 << 20


def identity_of(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns the step and the store of a checkpoint; None if its manifest is missing or cannot be used."""
    try:
        return _identity_in(_manifest(Path(folder)))
    except MemascendError:
        return None


def position_of(folder: str | os.PathLike[str]) -> str | None:
    """Returns the Trainer's position in a checkpoint; None if the manifest is missing, unusable or has no position."""
    try:
        return _manifest(Path(folder)).get("position")
    except MemascendError:
        return None


def _identity_in(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: manifest[name] for name in ("store", "step")}


def _divided(key: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Splits the name of a state tensor into the parameter's name in the model and the name of the state.

    Both parts may contain dots. `names`: a parameter's name in files -> its name in the model.
    """
    ends = [end for end, letter in enumerate(key) if letter == "." and key[:end] in names]
    end = ends[-1] if ends else key.rfind(".")
    return names.get(key[:end], key[:end]), key[end + 1 :]


def state_key(name: str, of: str) -> str:
    """Returns the name of the state tensor `of` of the parameter `name` in a checkpoint."""
    return f"{saved_name(name)}.{of}"


def render_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Returns the bytes of the manifest's file.

    Equal manifests give equal bytes. So a reader can render the manifest again, and compare all bytes with the file.
    """
    content = {name: value for name, value in manifest.items() if name != "checksum"}
    checksum = checksum_of(torch.frombuffer(bytearray(json.dumps(content, sort_keys=True).encode()), dtype=torch.uint8))
    return json.dumps({**content, "checksum": checksum}, sort_keys=True, indent=1).encode() + b"\n"


class Checkpoint:
    """A checkpoint on storage: its folder and its checked manifest."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Reads and checks the manifest. Checks that every file exists and has the right length.

        Raises:
            ConfigError: the folder has no manifest.
            CorruptionError: the checkpoint is damaged, a file is missing, or the checkpoint has another version. The
                message names the problem.
            StorageError: the manifest cannot be read.
        """
        self.folder = Path(folder)
        self.manifest = _manifest(self.folder)
        for name, entry in self.manifest["files"].items():
            path = self.folder / name
            try:
                nbytes = path.stat().st_size
            except OSError as error:
                raise CorruptionError(
                    f"the checkpoint {self.folder} is partial: {name} is missing or cannot be opened. Copy the whole "
                    "folder again",
                    errno=error.errno,
                    path=str(path),
                ) from error
            if nbytes != entry["bytes"]:
                raise CorruptionError(
                    f"{path} has {nbytes} bytes, but {entry['bytes']} bytes according to the checkpoint's manifest. "
                    "The file was cut off or replaced. Copy the file again, or use another checkpoint",
                    path=str(path),
                )

    def verify(self, rank: int = 0, count: int = 1) -> None:
        """Compares the checksums of all files with the manifest. Each of `count` ranks reads a part of the bytes.

        Raises:
            CorruptionError: a checksum differs, or a file has other tensors than its entry in the manifest. The message
                names the file.
            StorageError: a file cannot be read.
        """
        total = sum(entry["bytes"] for entry in self.manifest["files"].values()) // count
        turns = itertools.count()

        def mine() -> bool:
            return next(turns) % count == rank

        with Progress("checking the checkpoint", total) as progress:
            for name, entry in self.manifest["files"].items():
                with file_errors(self.folder / name, "cannot be read"):
                    _verify(self.folder / name, entry, mine, progress)


def _manifest(folder: Path) -> dict[str, Any]:
    """Reads and checks a manifest; raises the errors of `Checkpoint()`."""
    path = folder / FOLDER / MANIFEST
    if not path.exists():
        raise ConfigError(
            f"{folder} is not a checkpoint of memascend: {FOLDER}/{MANIFEST} is missing. Pass a folder that "
            "optimizer.save() has written"
        )
    text = read_bounded(path, "manifest of a checkpoint. Use another checkpoint")
    try:
        manifest: dict[str, Any] = json.loads(text)
        whole = isinstance(manifest, dict) and render_manifest(manifest) == text
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path} is damaged: {error}. Use another checkpoint", path=str(path)) from error
    if not whole:
        raise CorruptionError(
            f"{path} is damaged or was rewritten by another program: its bytes are not those that memascend writes. "
            "Use another checkpoint",
            path=str(path),
        )
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise CorruptionError(
            f"{path} is {manifest.get('format')!r} version {manifest.get('version')!r}, but this version of memascend "
            f"reads {FORMAT!r} version {VERSION}. Use the version of memascend that wrote the checkpoint",
            path=str(path),
        )
    problem = _malformed(manifest)
    if problem:
        raise CorruptionError(f"{path} is malformed ({problem}). Use another checkpoint", path=str(path))
    return manifest


def _malformed(manifest: dict[str, Any]) -> str | None:
    """Returns a description of the first malformed field; None if all fields are well-formed."""
    kinds = {"step": int, "store": str, "optimizer": str, "groups": list, "files": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(manifest.get(name), kind)]
    wrong += [name for name in ("loss_scale", "user_state") if name not in manifest]
    if wrong:
        return f"no valid {wrong[0]}"
    if not isinstance(manifest.get("user_states", []), list):
        return "user_states"
    if manifest["step"] < 0 or not all(isinstance(group, dict) for group in manifest["groups"]):
        return "step or groups"
    if not is_roster(manifest.get("members", [])):
        return "members"
    if not is_owners(manifest.get("owners", [])):
        return "owners"
    return next((f"the entry of {name!r}" for name, entry in manifest["files"].items() if not _well(name, entry)), None)


def _well(name: str, entry: Any) -> bool:
    """True if the path `name` is inside the checkpoint and the entry of this file is well-formed."""
    parts = Path(name).parts
    inside = parts in ((name,), (FOLDER, parts[-1] if parts else "")) and ".." not in parts and parts[-1] != "/"
    kinds = {"bytes": int, "header": str, "tensors": dict}
    is_whole = isinstance(entry, dict) and all(isinstance(entry.get(of), kind) for of, kind in kinds.items())
    return inside and is_whole and all(isinstance(one, str) or _in_parts(one) for one in entry["tensors"].values())


def _in_parts(entry: Any) -> bool:
    """True if `entry` is a list that has, for each part of a tensor, the part's first byte and checksum.

    The parts must be in order and begin with byte 0.
    """
    whole = isinstance(entry, list) and all(
        isinstance(part, list) and [*map(type, part)] == [int, str] for part in entry
    )
    firsts = [part[0] for part in entry] if whole else []
    return firsts[:1] == [0] and firsts == sorted(firsts)


def _verify(path: Path, entry: Mapping[str, Any], mine: Callable[[], bool], progress: Progress) -> None:
    """Compares a safetensors file with its entry in the manifest.

    Checks the header. Calls `mine()` once for each part of a tensor, and checks the part if the result is True.
    """
    buffer = bytearray(_READ_BYTES)
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123

        def checksum(start: int, nbytes: int) -> str:
            done = Checksum()
            file.seek(start)
            while nbytes:
                with memoryview(buffer)[: min(nbytes, len(buffer))] as part:
                    got = file.readinto(part)
                if not got:
                    break
                done.update(torch.frombuffer(buffer, dtype=torch.uint8)[:got])
                progress.add(got)
                nbytes -= got
            return str(done)

        length = int.from_bytes(file.read(8), "little")
        if length > entry["bytes"] - 8 or checksum(0, 8 + length) != entry["header"]:
            raise CorruptionError(
                f"the header of {path} is damaged: its checksum differs from the manifest. Use another checkpoint",
                path=str(path),
            )
        file.seek(8)
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        if header.keys() != entry["tensors"].keys():
            raise CorruptionError(
                f"the tensors in {path} differ from the tensors in the checkpoint's manifest, although the header's "
                "checksum is right, so the manifest is wrong. Use another checkpoint",
                path=str(path),
            )
        for name, described in header.items():
            start, end = described["data_offsets"]
            for first, until, expected in _parts(entry["tensors"][name], end - start):
                if mine() and checksum(8 + length + start + first, until - first) != expected:
                    raise CorruptionError(
                        f"{name!r} in {path} is damaged: its checksum differs from the manifest. Use another "
                        "checkpoint",
                        path=str(path),
                        offset=8 + length + start + first,
                        nbytes=until - first,
                    )


def _parts(entry: Any, nbytes: int) -> list[tuple[int, int, str]]:
    """Returns the first byte, the end and the checksum of each part of a tensor.

    `entry`: the tensor's manifest entry.
    """
    firsts, sums = ([0], [entry]) if isinstance(entry, str) else zip(*entry, strict=True)
    return [*zip(firsts, [*firsts[1:], nbytes], sums, strict=True)]


@dataclass(eq=False)
class CheckpointValues:
    """Supplies the first values of a store from a checkpoint."""

    checkpoint: Checkpoint
    subject: Subject
    partition: Partition  # the rows of the model's parameters that this rank has; all rows for one process

    def __post_init__(self) -> None:
        self.step: int = self.checkpoint.manifest["step"]
        self.user_state: Any = _user_state(self.checkpoint.manifest, self.partition.layout)
        self._weights = WeightFiles(self.checkpoint.folder)
        # The names of the files with optimizer state.
        files = [name for name in self.checkpoint.manifest["files"] if Path(name).parent.name == FOLDER]
        self._state = WeightFiles(self.checkpoint.folder, files)
        # The name of a parameter whose state is converted -> the state's form in the checkpoint, its form in this run.
        self._conversions: dict[str, tuple[StateForm, StateForm]] = {}

    def check(self) -> None:
        """Rejects a checkpoint that is damaged or belongs to another model or optimizer. Warns if state is converted.

        Raises:
            ConfigError: the checkpoint's weights, optimizer, groups or state do not fit this run.
            CorruptionError: the checkpoint is damaged.
            StorageError: a file cannot be read.
        """
        where, manifest = self.checkpoint.folder, self.checkpoint.manifest
        here = title_of(self.subject.arithmetic.optimizer)
        if manifest["optimizer"] != here:
            raise ConfigError(
                f"the checkpoint {where} was saved with {manifest['optimizer']}, but this run's optimizer is {here}. "
                "Use the optimizer of the checkpoint, or use only the checkpoint's weights with weights="
            )
        self.subject.arithmetic.require_members(manifest, f"the checkpoint {where}")
        groups = self.subject.arithmetic.optimizer.param_groups
        if len(manifest["groups"]) != len(groups):
            raise ConfigError(
                f"the checkpoint {where} has {len(manifest['groups'])} parameter groups, but the optimizer has "
                f"{len(groups)}. Make the optimizer with the parameter groups with which the checkpoint was saved"
            )
        whole = {name: self.partition.whole(name, parameter) for name, parameter in self.subject.named.items()}
        buffers = {name: self.subject.buffers.tensor(name) for name in self.subject.buffers.names}
        self._weights.check(Names(self.subject.model), {**whole, **buffers})
        problems = self._problems()
        if problems:
            raise ConfigError(
                f"the optimizer state in the checkpoint {where} does not fit this run: {listed(problems, '; ')}. Use "
                "the options with which the checkpoint was saved"
            )
        self.checkpoint.verify(self.partition.layout.rank, self.partition.layout.size)
        words = conversion_warning(where, self._conversions.values())
        if words is not None:
            warn(words)

    def _problems(self) -> list[str]:
        """Describes the state tensors that do not fit this run. Also fills `_conversions`."""
        there: dict[str, dict[str, torch.Tensor]] = {}
        of_saved = {saved_name(name): name for name in self.subject.named}
        for key in self._state.keys:
            name, of = _divided(key, of_saved)
            there.setdefault(name, {})[of] = self.partition.part(name, self._state.on_meta(key), of)
        if self.partition.layout.size > 1:
            # Skip parameters that have no rows on this rank, because other ranks check these parameters.
            there = {name: tensors for name, tensors in there.items() if name in self.subject.named}
        problems = []
        for name in self.subject.trained:
            problems += self._problems_of(name, there.pop(name, {}))
        for name, tensors in there.items():
            problems += [f"{state_key(name, of)}, which the optimizer does not use" for of in sorted(tensors)]
        return problems

    def _problems_of(self, name: str, found: dict[str, torch.Tensor]) -> list[str]:
        """Describes a parameter's state tensors that do not fit this run.

        If the form of the state can be converted, adds the conversion to `_conversions` instead.
        """
        kept, shape = self._kept(name), self.subject.named[name].shape
        wanted = {**kept, UPDATES: torch.empty((), dtype=torch.int64, device="meta")}
        one = form_of({of: tensor for of, tensor in found.items() if of != UPDATES}, shape)
        if kinds_of(found) != kinds_of(wanted):
            other = form_of(kept, shape)
            if UPDATES in found and one is not None and other is not None and one.moments == other.moments:
                self._conversions[name] = one, other
                return []
        elif self._order_of(name) != self._own_order(name):
            # The checkpoint's blocks cover other elements than this run's blocks, so the state has to be decoded and
            # encoded again.
            assert one is not None
            self._conversions[name] = one, one
        problems = [f"{state_key(name, of)} is missing" for of in wanted if of not in found]
        problems += [
            f"{state_key(name, of)}, which the optimizer does not use" for of in sorted(found.keys() - wanted.keys())
        ]
        for of in wanted.keys() & found.keys():
            dtype, shape = found[of].dtype, found[of].shape
            if dtype != wanted[of].dtype or shape != wanted[of].shape:
                problems.append(
                    f"{state_key(name, of)} is {dtype} of shape {list(shape)}, not {wanted[of].dtype} of shape "
                    f"{list(wanted[of].shape)}"
                )
        return problems

    def _kept(self, name: str) -> dict[str, torch.Tensor]:
        """Returns the state tensors of a parameter in this run, on meta, in the form of a checkpoint."""
        return plain_tensors(self.subject.arithmetic.of(self.subject.named[name]).describe())

    def _order_of(self, name: str) -> list[int] | None:
        """Returns the order of a parameter's dimensions that the checkpoint's blocks follow; None for row-major."""
        orders: dict[str, list[int]] = self.checkpoint.manifest.get("orders", {})
        return orders.get(saved_name(name))

    def _own_order(self, name: str) -> list[int] | None:
        """Returns the order of a parameter's dimensions that this run's blocks follow; None for row-major.

        If this run does not divide the parameter's state into blocks, returns the checkpoint's order.
        """
        if not any(map(is_in_blocks, self._kept(name))):
            return self._order_of(name)
        parameter = self.subject.named[name]
        strides = dense_strides(parameter)
        order = order_of(torch.empty_strided(parameter.shape, strides, device="meta"))
        return None if order is None else list(order)

    def hyperparameters(self) -> dict[str, Any]:
        """Returns the checkpoint's hyperparameters and identity. A new store keeps the result until its first step."""
        manifest = self.checkpoint.manifest
        names = ("groups", "loss_scale", "attributes", "seed", "schedule", "position")
        return {**{name: manifest[name] for name in names if name in manifest}, "origin": _identity_in(manifest)}

    def parameters(self, units: Sequence[Unit]) -> Generator[First, None, None]:
        """Yields the first values in the order of the units.

        Tensors that are not converted are views of the mapped files where possible.
        """
        trained = set(self.subject.trained)
        for unit in units:
            for name in unit.parameters:
                parameter = self.subject.named[name]
                whole = self._weights.tensor(name, self.partition.whole(name, parameter))
                values = laid_out(self.partition.part(name, whole), dense_strides(parameter))
                state: dict[str, torch.Tensor] = {}
                step = 0
                if name in trained:
                    step = int(self._state.at(state_key(name, UPDATES)).item())
                    state = self._state_of(name, whole)
                yield name, values, state, step

    def _state_of(self, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns this rank's part of a parameter's state; converted state is in float32.

        `values`: the whole parameter.
        """
        parameter = self.subject.named[name]
        if name in self._conversions:
            # Decode the state of the whole parameter, because a block may end in the middle of a row.
            whole = self._converted(name, values)
        else:
            whole = {of: self._state.at(state_key(name, of)) for of in self._kept(name)}
        parts = {of: self.partition.part(name, tensor, of) for of, tensor in whole.items()}
        strides = dense_strides(parameter)
        return {of: laid_out(one, strides) if one.shape == parameter.shape else one for of, one in parts.items()}

    def _converted(self, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the whole state of a parameter in float32. Leaves the master out if this run has no master."""
        one, other = self._conversions[name]
        strides = strides_of(values.shape, self._order_of(name))
        found = {of: self._state.at(state_key(name, of)) for of in one.kinds(values.shape)}
        laid = {of: laid_out(each, strides) if each.shape == values.shape else each for of, each in found.items()}
        whole = one.decoded(laid_out(values, strides), laid)
        if not other.master:
            whole.pop("master", None)
        return whole

    def buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a buffer's values from the checkpoint into `tensor`."""
        tensor.copy_(self._weights.tensor(name, tensor))


def _user_state(manifest: Mapping[str, Any], layout: Layout) -> Any:
    """Returns this rank's `user_state`.

    If the checkpoint has a different `user_state` for each rank, and the number of ranks has changed, warns, and
    returns the `user_state` of rank 0.
    """
    states = manifest.get("user_states", [manifest["user_state"]] * layout.size)
    if len(states) == layout.size:
        return states[layout.rank]
    warn(
        f"{len(states)} ranks wrote this checkpoint, but {layout.size} ranks start from it. So every rank gets the "
        "user_state of rank 0, and the user_state of all other ranks is not used. To give each rank its own "
        f"user_state, start {len(states)} ranks"
    )
    return manifest["user_state"]
