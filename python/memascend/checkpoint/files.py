"""Writes safetensors files, matches names in them with a model's, and replaces folders atomically."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import stat
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memascend.errors import ConfigError, CorruptionError, StorageError, UsageError
from memascend.storage import checksum_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping


@contextmanager
def file_errors(path: Path, what: str) -> Iterator[None]:
    """Around work on a file or folder: errors name the path; `what` is a text such as "cannot be read"."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path} {what}: {error.strerror}", errno=error.errno, path=str(path)) from error
    except Exception as error:
        # Errors of Rust libraries, as safetensors and tokenizers, have the system's number as text alone.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        reason = os.strerror(int(number[1]))
        raise StorageError(f"{path} {what}: {reason}", errno=int(number[1]), path=str(path)) from error


# What describes a million tensors is smaller.
_JSON_BYTES_MAX = 256 << 20


def read_bounded(path: Path, what: str) -> bytes:
    """The bytes of a file of JSON; `what` it is no longer if it is too large, and what to do then."""
    with file_errors(path, "cannot be read"):
        if path.stat().st_size > _JSON_BYTES_MAX:
            raise CorruptionError(f"{path} is larger than {_JSON_BYTES_MAX} bytes, so it is no {what}", path=str(path))
        return path.read_bytes()


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A new folder beside the target, removed at the end with what it then has; so is one of a killed process."""
    new = target.parent / f".{target.name}.memascend-saving"
    with file_errors(new, "cannot be written"), _locked(target):
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        try:
            yield new
        finally:
            shutil.rmtree(new, ignore_errors=True)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Keep other processes from saving to a folder, by a file beside it, which is removed at the end.

    A killed process leaves the file, and its lock ends.
    """
    path = target.parent / f".{target.name}.memascend-lock"
    with contextlib.ExitStack() as ends:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            ends.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another process is saving to {target} now, and both would write the same files: wait for it, or "
                    "save to another folder"
                ) from None
            except OSError as error:
                # A mount without locks.
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
            # Whoever had it may have removed it in between.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    break
        ends.callback(path.unlink, missing_ok=True)
        yield


def put_in_place(target: Path, new: Path) -> None:
    """Replace the target by the new folder; at every moment one of them is whole."""
    with file_errors(target, "cannot be written"):
        if target.is_dir():
            # The permissions stay as they were.
            new.chmod(stat.S_IMODE(target.stat().st_mode))
        for path, _, _ in os.walk(new):
            sync(Path(path))
        if not target.exists() or is_empty(target):
            new.rename(target)
        elif not _exchange(new, target):
            old = target.parent / f".{target.name}.memascend-old"
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            new.rename(target)
            shutil.rmtree(old)
        sync(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders atomically; False if the system or the file system cannot."""
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    done: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0


def is_empty(path: Path) -> bool:
    """Whether a path is an empty folder."""
    return path.is_dir() and not any(path.iterdir())


def sync(path: Path) -> None:
    """Flush a file or folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# torch's dtypes by their names in safetensors.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The largest size of a file, unless a single tensor is larger: suits file systems, caches and downloads.
FILE_BYTES_MAX = 4 << 30
_ALIGN = 64


@dataclass
class FileLayout:
    """One file: its name, and its tensors, which may be on meta."""

    name: str
    tensors: dict[str, torch.Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def header(self) -> tuple[bytes, dict[str, int]]:
        """The bytes before the data, and where in the file each tensor begins."""
        # The largest elements come first, so that every tensor is aligned to its elements.
        names = sorted(self.tensors, key=lambda name: -self.tensors[name].element_size())
        described: dict[str, Any] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        offsets, at = {}, 0
        for name in names:
            tensor = self.tensors[name]
            if tensor.dtype not in _NAMES:
                raise ConfigError(
                    f"{name!r} is {tensor.dtype}, which safetensors has no name for, so that it cannot be saved: give "
                    "it another dtype, or register it as a buffer with persistent=False"
                )
            end = at + tensor.nbytes
            described[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
            offsets[name], at = at, end
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=True).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        start = 8 + len(text)
        return len(text).to_bytes(8, "little") + text, {name: start + offset for name, offset in offsets.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def divide_into_files(stem: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> list[FileLayout]:
    """Divide tensors, in their order, over files of a bounded size, named as transformers names them."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    nbytes = 0
    for name, tensor in tensors.items():
        if parts[-1] and nbytes + tensor.nbytes > FILE_BYTES_MAX:
            parts.append({})
            nbytes = 0
        parts[-1][name] = tensor
        nbytes += tensor.nbytes
    if len(parts) == 1:
        return [FileLayout(f"{stem}.safetensors", parts[0], metadata)]
    return [
        FileLayout(f"{stem}-{number:05}-of-{len(parts):05}.safetensors", part, metadata)
        for number, part in enumerate(parts, 1)
    ]


def make_file(folder: Path, layout: FileLayout) -> tuple[dict[str, Any], dict[str, int]]:
    """Make a file of its full size with its header, whose tensors are written later.

    Returns its part of the manifest, without tensors, and where in the file each tensor begins.
    """
    path = folder / layout.name
    header, offsets = layout.header()
    nbytes = len(header) + layout.nbytes
    with file_errors(path, "cannot be written"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:  # noqa: PTH123
            # Before the header: NFS writes all of a page that is new at its end, over what other hosts write there.
            file.truncate(nbytes)
            file.write(header)
            file.flush()
            os.fsync(descriptor)
    return {"bytes": nbytes, "header": checksum_of(torch.frombuffer(bytearray(header), dtype=torch.uint8))}, offsets


@dataclass(frozen=True)
class Matched:
    """The names in files, matched with a model's."""

    # By the model's first name of a tensor, its names in the files; the first name comes first.
    of: dict[str, list[str]]
    unexpected: list[str]  # names in the files that the model has nothing for
    named: dict[str, str]  # by name in the files, the model's name for the tensor, first or tied


class BufferPlace(NamedTuple):
    """A place of a buffer: its name in the model, its module, and its name there."""

    name: str
    module: torch.nn.Module
    short: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The buffer; None if the model has dropped it."""
        return self.module._buffers.get(self.short)  # noqa: SLF001

    @property
    def is_saved(self) -> bool:
        """Whether a state dict has it."""
        return self.short not in self.module._non_persistent_buffers_set  # noqa: SLF001

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor here."""
        self.module._buffers[self.short] = tensor  # noqa: SLF001


def each_buffer(model: torch.nn.Module) -> Iterator[tuple[BufferPlace, torch.Tensor]]:
    """Every buffer of a model at each of its places."""
    for prefix, module in model.named_modules():
        for short, tensor in module._buffers.items():  # noqa: SLF001
            if tensor is not None:
                yield BufferPlace(f"{prefix}.{short}" if prefix else short, module, short), tensor


def saved_name(name: str) -> str:
    """The name of a tensor in files, that of the state dict: without the level of torch's `checkpoint_wrapper()`."""
    return name.replace("_checkpoint_wrapped_module.", "")


class Names:
    """All names of a model's tensors; a tied tensor is known by its first name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._first: dict[str, str] = {}
        # Further names of tied tensors, and the first name of each.
        self.tied: dict[str, str] = {}
        # Buffers that are not in a state dict, and may still be in files.
        self._unsaved: set[str] = set()
        prefix = getattr(model, "base_model_prefix", None)
        self._base = prefix if isinstance(prefix, str) and prefix else None
        seen: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first = self._first[name] = self._first[saved_name(name)] = seen.setdefault(id(parameter), name)
            if first != name:
                self.tied[saved_name(name)] = saved_name(first)
        for place, buffer in each_buffer(model):
            name = saved_name(place.name)
            first = self._first[place.name] = self._first[name] = seen.setdefault(id(buffer), place.name)
            if not place.is_saved:
                self._unsaved |= {place.name, name}
            elif first != place.name:
                self.tied[name] = saved_name(first)

    def matched(self, keys: Collection[str]) -> Matched:
        """Match the names in files, as they are or with a prefix added or removed, so that the fewest are left over."""
        best = self._with(keys, None)
        if self.left(best):
            for prefix in self._prefixes(keys):
                found = self._with(keys, prefix)
                if self.left(found) < self.left(best):
                    best = found
        return best

    def left(self, found: Matched) -> int:
        """How many names are left over, on both sides."""
        wanted = {first for name, first in self._first.items() if name not in self._unsaved}
        return len(found.unexpected) + len(wanted - found.of.keys())

    def _prefixes(self, keys: Collection[str]) -> Iterator[str]:
        if self._base is not None:
            yield self._base
            return
        yield from dict.fromkeys(name.partition(".")[0] for names in (self._first, keys) for name in names)

    def _with(self, keys: Collection[str], prefix: str | None) -> Matched:
        of: dict[str, list[str]] = {}
        unexpected = []
        named = {}
        for key in keys:
            ways = [key]
            if prefix is not None:
                ways += [f"{prefix}.{key}", key.removeprefix(f"{prefix}.")]
            name = next((way for way in ways if way in self._first), None)
            if name is None:
                unexpected.append(key)
                continue
            named[key], first = name, self._first[name]
            keys_of = of.setdefault(first, [])
            keys_of.insert(0 if name == first else len(keys_of), key)
        return Matched(of, unexpected, named)
