"""Creates safetensors files, matches the names in files with a model's names, and replaces folders atomically."""

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
    """Converts a system error in the block to a StorageError with the message "`path` `what`: reason".

    `what` is a predicate, for example "cannot be read".
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path} {what}: {error.strerror}", errno=error.errno, path=str(path)) from error
    except Exception as error:
        # Errors of Rust libraries (safetensors, tokenizers) have the system's error number only in their message.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        reason = os.strerror(int(number[1]))
        raise StorageError(f"{path} {what}: {reason}", errno=int(number[1]), path=str(path)) from error


# The largest size of a JSON file that is read. An index or manifest of a million tensors is smaller.
_JSON_BYTES_MAX = 256 << 20


def read_bounded(path: Path, what: str) -> bytes:
    """Returns the bytes of a JSON file.

    `what`: the end of the error message for a file that is too large. This end says what the file should be and what
    the user should do.

    Raises:
        CorruptionError: the file is too large.
        StorageError: the file cannot be read.
    """
    with file_errors(path, "cannot be read"):
        if path.stat().st_size > _JSON_BYTES_MAX:
            raise CorruptionError(
                f"{path} is larger than {_JSON_BYTES_MAX} bytes, so it is not the {what}", path=str(path)
            )
        return path.read_bytes()


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Locks the target, and makes a new folder beside it.

    If a killed process left such a folder, first removes that folder. If the save fails, the end of the block removes
    the new folder. If the save succeeds, `replace_folder()` moves the new folder to the target. If it exchanges the two
    folders, the end of the block removes the earlier folder.

    Raises:
        UsageError: another process is saving to the target.
        StorageError: the lock or the new folder cannot be made, or the block raised a system error.
    """
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
    """Locks a file beside a folder, so that other processes cannot save to the folder.

    If the file system does not support locks, other processes can still save. Removes the file at the end of the block.

    A killed process does not remove the file, but the kernel releases the lock.

    Raises:
        UsageError: another process holds the lock.
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
                    f"another process is saving to {target} now, and two processes would write the same files. Wait "
                    "until the other process has finished, or save to another folder"
                ) from None
            except OSError as error:
                # Continue without a lock if the file system does not support locks.
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
            # The process that held the lock before may have removed the file after this open(). In this case open the
            # path again.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    break
        ends.callback(path.unlink, missing_ok=True)
        yield


def replace_folder(target: Path, new: Path) -> None:
    """Flushes the folder `new`, and replaces the folder `target` by `new`.

    At every moment one complete folder is on storage. If the two cannot be exchanged atomically, this folder is called
    `.{target}.memascend-old` for a moment.
    """
    with file_errors(target, "cannot be written"):
        if target.is_dir():
            # The new folder gets the permissions of the target.
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
    """Exchanges two folders atomically. Returns False if this fails, as on file systems without support."""
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    done: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0


def is_empty(path: Path) -> bool:
    """True if a path is an empty folder."""
    return path.is_dir() and not any(path.iterdir())


def sync(path: Path) -> None:
    """Flushes a file or a folder to storage."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The name of a dtype in safetensors -> torch's dtype.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The most bytes of tensors in a file, unless a single tensor is larger. This size suits file systems, caches and
# downloads.
FILE_BYTES_MAX = 4 << 30
_ALIGN = 64


@dataclass
class FileLayout:
    """One safetensors file: its name, its tensors and its metadata. The tensors may be on meta."""

    name: str
    tensors: dict[str, torch.Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def header(self) -> tuple[bytes, dict[str, int]]:
        """Returns the file's header (all bytes before the tensors' data), and the offset of each tensor in the file."""
        # Sort by element size, largest first, so that the offset of every tensor is a multiple of its element size.
        names = sorted(self.tensors, key=lambda name: -self.tensors[name].element_size())
        described: dict[str, Any] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        offsets, at = {}, 0
        for name in names:
            tensor = self.tensors[name]
            if tensor.dtype not in _NAMES:
                raise ConfigError(
                    f"{name!r} is {tensor.dtype}, and safetensors does not support this dtype, so the tensor cannot be "
                    "saved. Convert the tensor to another dtype, or, if it is a buffer, register it with "
                    "persistent=False"
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
        """The number of bytes of all tensors in the file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def divide_into_files(stem: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> list[FileLayout]:
    """Divides tensors, in their order, into files; see `FILE_BYTES_MAX`. Names the files as transformers does."""
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
    """Makes a file that has its full size and its header. The tensors are written later.

    Returns the file's entry in the manifest, and the offset of each tensor in the file. `write()` of
    `_CheckpointFiles` adds "tensors" to the entry later.
    """
    path = folder / layout.name
    header, offsets = layout.header()
    nbytes = len(header) + layout.nbytes
    with file_errors(path, "cannot be written"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:  # noqa: PTH123
            # Set the size before the header is written. An NFS client writes the last page of a file as a whole. If the
            # file ended with the header, the client would overwrite data that other hosts write to this page.
            file.truncate(nbytes)
            file.write(header)
            file.flush()
            os.fsync(descriptor)
    return {"bytes": nbytes, "header": checksum_of(torch.frombuffer(bytearray(header), dtype=torch.uint8))}, offsets


@dataclass(frozen=True)
class Matched:
    """The result of matching the names in files with a model's names."""

    # The model's first name of a tensor -> the tensor's names in the files. A tied tensor may have several names in the
    # files. The list begins with the name that matches the model's first name, if the files have this name.
    of: dict[str, list[str]]
    unexpected: list[str]  # names in the files whose tensors the model does not have
    named: dict[str, str]  # a name in the files -> the model's name that it matches, which may be a tied name


class BufferPlace(NamedTuple):
    """A place of a buffer in a model: the buffer's full name, its module, and its name in this module."""

    name: str
    module: torch.nn.Module
    short: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The buffer; None if the model has dropped the buffer."""
        return self.module._buffers.get(self.short)  # noqa: SLF001

    @property
    def is_saved(self) -> bool:
        """True if the buffer is persistent, so that a state dict contains it."""
        return self.short not in self.module._non_persistent_buffers_set  # noqa: SLF001

    def put(self, tensor: torch.Tensor) -> None:
        """Sets another tensor as the buffer at this place."""
        self.module._buffers[self.short] = tensor  # noqa: SLF001


def each_buffer(model: torch.nn.Module) -> Iterator[tuple[BufferPlace, torch.Tensor]]:
    """Yields every buffer of a model, once for each of its places."""
    for prefix, module in model.named_modules():
        for short, tensor in module._buffers.items():  # noqa: SLF001
            if tensor is not None:
                yield BufferPlace(f"{prefix}.{short}" if prefix else short, module, short), tensor


def saved_name(name: str) -> str:
    """Returns a tensor's name in files and state dicts.

    Removes the level that torch's `checkpoint_wrapper()` adds to the name.
    """
    return name.replace("_checkpoint_wrapped_module.", "")


class Names:
    """All names of a model's tensors. Maps each name of a tied tensor to the tensor's first name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._first: dict[str, str] = {}
        # Maps each further name of a tied tensor to the tensor's first name. Both are names as in a state dict. Leaves
        # out names of non-persistent buffers.
        self.tied: dict[str, str] = {}
        # The names of non-persistent buffers. A state dict does not contain these buffers, but files may.
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
        """Matches names in files with the model's names. Adds or removes a prefix if this makes more names match."""
        best = self._with(keys, None)
        if self.left(best):
            for prefix in self._prefixes(keys):
                found = self._with(keys, prefix)
                if self.left(found) < self.left(best):
                    best = found
        return best

    def left(self, found: Matched) -> int:
        """Returns the number of names without a match, in the files and in the model together."""
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
