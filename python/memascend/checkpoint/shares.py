"""Writes tensors into the files of a checkpoint. Each rank writes its own rows, or rank 0 writes all rows."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.checkpoint.contents import GatheredContents, ShareContents, send_contents
from memascend.checkpoint.files import file_errors, saved_name
from memascend.checkpoint.reader import FOLDER, state_key
from memascend.storage import Checksum
from memascend.tensors import memory_of
from memascend.text import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from memascend.checkpoint.contents import Contents, StoreContents
    from memascend.distributed.control_plane import Exchange
    from memascend.distributed.sharding import Sharding

    # Name of a file -> name of a tensor -> offset of the tensor in the file.
    Places = Mapping[str, Mapping[str, int]]
    # The part of a tensor that one process has written: its first byte, its end, its checksum.
    Part = tuple[int, int, str]
    # (name of a file, name of a tensor) -> the parts that the processes have written, in order.
    Sums = Mapping[tuple[str, str], Sequence[Part]]


_log = logging.getLogger("memascend")
# The number of bytes that are written to the page cache before the files are flushed.
_FLUSH_BYTES = 256 << 20
# The largest number of files that are open at once. A checkpoint of terabytes has more files than a process may open.
_OPEN_MAX = 16
# Temporary files in the folder of a checkpoint: one with the offsets of all tensors, and one per rank except rank 0,
# with the parts that this rank has written and their checksums.
_PLACES = ".memascend-places"
_SUMS = ".memascend-sums-{}"
# The number of times within `timeout` that a writing rank reports that it has not finished.
_BEATS = 4


class TensorFiles:
    """Writes one process's part of a checkpoint's files. Writes one range of bytes of each tensor, from start to end.

    Other ranks may write to the same pages of a file. So this process opens the files for writing only, and never reads
    the files. An NFS client that has read a page may later write the whole page back, and so overwrite new bytes of
    other ranks with old bytes.
    """

    def __init__(self, folder: Path, descriptor: int, places: Places) -> None:
        """`descriptor`: the file descriptor of `folder`.

        Files are opened relative to this descriptor. So a rank that hangs cannot write to the folder of a later save,
        which may have the same path.
        """
        self._folder = folder
        self._descriptor = descriptor
        self._places = {
            (Path(file).parent.name == FOLDER, name): (file, offset)
            for file, offsets in places.items()
            for name, offset in offsets.items()
        }
        self._open: dict[str, int] = {}
        self._unflushed = 0
        # (name of a file, name of a tensor) -> the first byte, the end, and the checksum of the bytes written so far.
        self._written: dict[tuple[str, str], tuple[int, int, Checksum]] = {}

    def put(self, name: str, of: str, start: int, values: torch.Tensor) -> None:
        """Writes consecutive elements of the record `name`, from element `start` on.

        `of`: the name of a state tensor, or "" for the record's values.

        Each call for a tensor must continue where the previous call for the same tensor ended.
        """
        if values.numel() == 0:
            return
        key = state_key(name, of) if of else saved_name(name)
        file, offset = self._places[bool(of), key]
        at = start * values.element_size()
        first, end, checksum = self._written.get((file, key)) or (at, at, Checksum())
        assert end == at, f"{key} of {self._folder}: byte {at} after {end}"
        checksum.update(values)
        self._written[file, key] = first, at + values.nbytes, checksum
        part, done = memory_of(values), 0
        with file_errors(self._folder / file, "cannot be written"):
            descriptor = self._file(file)
            while done < len(part):
                done += os.pwrite(descriptor, part[done:], offset + at + done)
            self._unflushed += done
            if self._unflushed >= _FLUSH_BYTES:
                self._flush()

    def _file(self, name: str) -> int:
        """Returns the descriptor of a file. If `_OPEN_MAX` files are open, first flushes and closes all of them."""
        if name not in self._open:
            if len(self._open) == _OPEN_MAX:
                self._flush()
                self.close()
            self._open[name] = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._descriptor)
        return self._open[name]

    def _flush(self) -> None:
        """Flushes the open files, and drops their pages from the page cache."""
        for descriptor in self._open.values():
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unflushed = 0

    def finish(self) -> dict[tuple[str, str], Part]:
        """Flushes all files. Returns the written part of each tensor."""
        with file_errors(self._folder, "cannot be written"):
            self._flush()
        return {key: (first, end, str(checksum)) for key, (first, end, checksum) in self._written.items()}

    def close(self) -> None:
        """Closes the files that are open."""
        while self._open:
            os.close(self._open.popitem()[1])


def write_into(
    folder: Path,
    places: Places,
    contents: Contents,
    descriptor: int | None = None,
    beat: Callable[[], object] = lambda: None,
) -> dict[tuple[str, str], list[Part]]:
    """Writes all of `contents` into the files of a folder, and flushes the files. Returns the written parts.

    Calls `beat` after each write. `descriptor`: the file descriptor of the folder, if the caller has opened it.
    """
    with contextlib.ExitStack() as ends:
        if descriptor is None:
            with file_errors(folder, "cannot be read"):
                descriptor = _opened(folder, ends)
        files = TensorFiles(folder, descriptor, places)
        ends.callback(files.close)
        progress = ends.enter_context(Progress("saving the checkpoint", contents.nbytes))

        def put(name: str, of: str, start: int, values: torch.Tensor) -> None:
            files.put(name, of, start, values)
            progress.add(values.nbytes)
            beat()

        contents.read(put)
        return {key: [part] for key, part in files.finish().items()}


def checksums_of(nbytes: int, parts: Sequence[Part]) -> str | list[tuple[int, str]]:
    """Returns a tensor's entry in the manifest.

    If the tensor has one part, the entry is the checksum of this part. If the tensor has several parts, the entry has
    the first byte and the checksum of each part. An empty tensor has no part; its entry is the checksum of no bytes.
    """
    ends = [0, *(end for _, end, _ in parts)]
    assert [*(first for first, _, _ in parts), nbytes] == ends, f"{parts} of {nbytes} bytes"
    if len(parts) > 1:
        return [(first, checksum) for first, _, checksum in parts]
    return parts[0][2] if parts else str(Checksum())


def _opened(folder: Path, ends: contextlib.ExitStack) -> int:
    """Opens a folder, and returns its file descriptor. Closing `ends` closes the descriptor."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    ends.callback(os.close, descriptor)
    return descriptor


class Shares:
    """Writes the tensors of checkpoints; all ranks take part."""

    def __init__(self, sharding: Sharding, exchange: Exchange) -> None:
        self._sharding = sharding
        self._exchange = exchange
        self._logged: str | None = None
        self._beat_at = 0.0

    def fill(self, own: StoreContents, folder: Path | None = None, places: Places | None = None) -> Sums:
        """Writes the tensors into the files of a folder; all ranks call this together.

        Rank 0 passes `folder` and `places`, and gets the written parts of all ranks. Other ranks pass neither `folder`
        nor `places`. If all ranks can write to the folder, one replica writes each parameter, and each rank of this
        replica writes its own rows. Otherwise the ranks of the first replica send their rows to rank 0, and rank 0
        writes all rows.

        Raises:
            StoppedError: rank 0 has to write all rows, but the rows of another rank did not arrive.
            RankError: another rank failed or did not answer.
            StorageError: a file or the store cannot be written or read.
            CorruptionError: the store is damaged.
        """
        sharding, exchange, rank = self._sharding, self._exchange, self._sharding.layout.rank
        word = uuid.uuid4().hex
        if folder is not None:
            _write(folder / _PLACES, {"word": word, "places": places})
        path, word = exchange.all_values([str(folder), word])[0]
        with contextlib.ExitStack() as ends:
            try:
                descriptor = _opened(Path(path), ends)
                # Open the file for writing to test the permission, but write nothing.
                with open(os.open(_PLACES, os.O_RDWR | os.O_CLOEXEC, dir_fd=descriptor), "rb") as file:  # noqa: PTH123
                    there = json.load(file)
                unseen = None if there["word"] == word else f"sees another folder at {path}"
            except (FileNotFoundError, ValueError):
                unseen = f"does not see {path}"
            except OSError as error:
                unseen = f"cannot write to {path} ({error.strerror})"
            found = exchange.all_values(unseen and f"rank {rank} on host {platform.node()} {unseen}")
            if folder is not None:
                (folder / _PLACES).unlink()
            others = [one for one in found if one is not None]
            self._log(
                f"rank 0 writes all rows, since {others[0]}"
                if others
                else f"each of {len(found)} ranks writes its rows"
            )
            if not others:
                return self._written(own, Path(path), there["places"], descriptor)
        line = exchange.line.open()
        # Only ranks of the first replica send rows, because ranks of other replicas have the same rows.
        given: Collection[str] = () if sharding.layout.replica else sharding.rows
        share = ShareContents(own, sharding.rows, sharding.layout, given)
        if folder is not None and places is not None:
            return write_into(folder, places, GatheredContents(share, line, exchange.size))
        send_contents(share, sharding.order, line)
        return {}

    def _log(self, way: str) -> None:
        """Logs on rank 0 how a checkpoint is written.

        Does not log again if the next checkpoint is written in the same way.
        """
        if way != self._logged and not self._exchange.rank:
            _log.info("saving the checkpoint: %s", way)
        self._logged = way

    def _written(self, own: StoreContents, folder: Path, places: Places, descriptor: int) -> Sums:
        """Writes the rows that this rank contributes; returns the written parts, on rank 0 those of all ranks."""
        sharding, exchange = self._sharding, self._exchange
        share = ShareContents(own, sharding.rows, sharding.layout, sharding.written)
        self._beat_at = time.monotonic() + exchange.timeout / _BEATS
        sums = write_into(folder, places, share, descriptor, self._beat)
        if exchange.rank:
            _write(folder / _SUMS.format(exchange.rank), [*sums.items()], descriptor)
        while not all(exchange.all_values(True)):
            pass
        for rank in () if exchange.rank else range(1, exchange.size):
            path = folder / _SUMS.format(rank)
            with file_errors(path, "cannot be read"):
                for (file, name), parts in json.loads(path.read_bytes()):
                    sums.setdefault((file, name), []).extend(parts)
                path.unlink()
        return sums

    def _beat(self) -> None:
        """Reports from time to time that this rank is still writing. Ranks that have finished wait for this rank.

        Once a rank has written its own rows, its `_written()` answers each report of another rank with
        `all_values(True)`.
        """
        if time.monotonic() >= self._beat_at:
            self._exchange.all_values(False)
            self._beat_at = time.monotonic() + self._exchange.timeout / _BEATS


def _write(path: Path, content: object, folder: int | None = None) -> None:
    """Writes and flushes a JSON file. `folder`: the file descriptor of its folder; None to open the file by `path`."""
    name = path if folder is None else path.name
    with file_errors(path, "cannot be written"):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=folder), "w", encoding="ascii") as file:  # noqa: PTH123
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
