"""Reads and checks a checkpoint's manifest, and the files that it names.

The format is in `docs/checkpoint-format.md`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.file_errors import file_errors
from memascend.checkpoint.weights import WeightFiles
from memascend.engine import Checksum
from memascend.errors import ConfigError, CorruptionError, MemascendError
from memascend.progress import Progress

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

# In the checkpoint's folder: what is ours, out of the way of tools that take every safetensors file for weights.
FOLDER = "memascend"
MANIFEST = "manifest.json"
FORMAT = "memascend checkpoint"
VERSION = 1
# Where moments are in formats of fewer bits, which version 1 does not have.
VERSION_OF_FORMATS = 2
# A million tensors need less.
_MANIFEST_BYTES_MAX = 256 << 20
_READ_BYTES = 8 << 20


def identity_of(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Which step of which store a checkpoint holds; None where there is none, or a damaged one."""
    try:
        manifest = _manifest(Path(folder))
    except MemascendError:
        return None
    return identity_in(manifest)


def identity_in(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Which step of which store a manifest is of."""
    # A line only where the store went back to an earlier step before.
    return {name: manifest[name] for name in ("store", "step", "line") if name in manifest}


def state_key(name: str, of: str) -> str:
    """What a state tensor of a parameter is called."""
    return f"{name}.{of}"


def render_manifest(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as it stands on disk: one way to write it, so that a change of any byte is seen."""
    content = {name: value for name, value in manifest.items() if name != "checksum"}
    checksum = Checksum()
    checksum.update(torch.frombuffer(bytearray(json.dumps(content, sort_keys=True).encode()), dtype=torch.uint8))
    return json.dumps({**content, "checksum": str(checksum)}, sort_keys=True, indent=1).encode() + b"\n"


class Checkpoint:
    """One that is there."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read and check its manifest, and that every file is there, as long as it was.

        Raises:
            ConfigError: there is none.
            CorruptionError: it is damaged, partial or of another version; the message says what.
        """
        self.folder = Path(folder)
        self.manifest = _manifest(self.folder)
        for name, said in self.manifest["files"].items():
            path = self.folder / name
            try:
                nbytes = path.stat().st_size
            except OSError as error:
                raise CorruptionError(
                    f"the checkpoint {self.folder} is partial: {name} is missing", errno=error.errno, path=str(path)
                ) from error
            if nbytes != said["bytes"]:
                raise CorruptionError(
                    f"{path} has {nbytes} bytes, and the checkpoint's manifest says {said['bytes']}", path=str(path)
                )

    def verify(self, rank: int = 0, count: int = 1) -> None:
        """Read every byte and compare it with the manifest; several ranks share the tensors among them.

        Raises:
            CorruptionError: something differs; it names file and tensor.
        """
        total = sum(said["bytes"] for said in self.manifest["files"].values()) // count
        turn = -1

        def mine() -> bool:
            nonlocal turn
            turn += 1
            return turn % count == rank

        with Progress("checking the checkpoint", total) as progress:
            for name, said in self.manifest["files"].items():
                _verify(self.folder / name, said, mine, progress)

    def weights(self) -> WeightFiles:
        """Its weights."""
        return WeightFiles(self.folder)

    def state(self) -> WeightFiles | None:
        """Its optimizer's state; None where there is none."""
        names = [name for name in self.manifest["files"] if Path(name).parent.name == FOLDER]
        return WeightFiles.of([self.folder / name for name in names]) if names else None


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / FOLDER / MANIFEST
    if not path.exists():
        raise ConfigError(f"{folder} is no checkpoint: it has no {FOLDER}/{MANIFEST}, which optimizer.save() writes")
    with file_errors(path, "cannot be read"):
        if path.stat().st_size > _MANIFEST_BYTES_MAX:
            raise CorruptionError(f"{path} is larger than {_MANIFEST_BYTES_MAX} bytes", path=str(path))
        text = path.read_bytes()
    try:
        manifest: dict[str, Any] = json.loads(text)
        whole = isinstance(manifest, dict) and render_manifest(manifest) == text
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path} is damaged: {error}", path=str(path)) from error
    if not whole:
        raise CorruptionError(f"{path} is damaged: its checksum is not that of what it says", path=str(path))
    if manifest.get("format") != FORMAT or manifest.get("version") not in (VERSION, VERSION_OF_FORMATS):
        raise CorruptionError(
            f"{path} is {manifest.get('format')!r} version {manifest.get('version')!r}; this memascend reads "
            f"{FORMAT!r} versions {VERSION} and {VERSION_OF_FORMATS}",
            path=str(path),
        )
    problem = _malformed(manifest)
    if problem:
        raise CorruptionError(f"{path} is malformed: {problem}", path=str(path))
    return manifest


def _malformed(manifest: dict[str, Any]) -> str | None:
    """What is wrong with the fields, though the checksum is right."""
    kinds = {"step": int, "store": str, "optimizer": str, "groups": list, "files": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(manifest.get(name), kind)]
    wrong += [name for name in ("loss_scale", "user_state") if name not in manifest]
    if wrong:
        return f"no {wrong[0]}"
    if not isinstance(manifest.get("user_states", []), list):
        return "user_states"
    if manifest["step"] < 0 or not all(isinstance(group, dict) for group in manifest["groups"]):
        return "step or groups"
    return next(
        (f"what it says of {name!r}" for name, said in manifest["files"].items() if not _well(name, said)), None
    )


def _well(name: str, said: Any) -> bool:
    """Whether a file is inside the checkpoint and described."""
    parts = Path(name).parts
    inside = parts in ((name,), (FOLDER, parts[-1] if parts else "")) and ".." not in parts and parts[-1] != "/"
    kinds = {"bytes": int, "header": str, "tensors": dict}
    return inside and isinstance(said, dict) and all(isinstance(said.get(of), kind) for of, kind in kinds.items())


def _verify(path: Path, said: Mapping[str, Any], mine: Callable[[], bool], progress: Progress) -> None:
    """Compare a safetensors file with what the manifest says of it; `mine` is asked for each tensor."""
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
        if length > said["bytes"] - 8 or checksum(0, 8 + length) != said["header"]:
            raise CorruptionError(
                f"the header of {path} is damaged: its checksum is not the manifest's", path=str(path)
            )
        file.seek(8)
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        if header.keys() != said["tensors"].keys():
            raise CorruptionError(f"{path} does not hold the tensors that the manifest names", path=str(path))
        for name, described in header.items():
            start, end = described["data_offsets"]
            if mine() and checksum(8 + length + start, end - start) != said["tensors"][name]:
                raise CorruptionError(
                    f"{name!r} in {path} is damaged: its checksum is not the manifest's",
                    path=str(path),
                    offset=8 + length + start,
                    nbytes=end - start,
                )
