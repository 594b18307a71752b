"""Streams safetensors files: the header first, then tensors in any order."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.file_errors import file_errors
from memascend.engine import Checksum
from memascend.errors import ConfigError
from memascend.tensors import memory_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Torch's types by the names that the format has for them.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Of one file, unless a single tensor is larger; what file systems, caches and downloads like.
FILE_BYTES_MAX = 4 << 30
# Bytes that may wait in the page cache before they are sent to the device.
_FLUSH_BYTES = 256 << 20
_ALIGN = 64


@dataclass
class FileLayout:
    """One file: its name, its tensors (meta ones will do) and where each begins."""

    name: str
    tensors: dict[str, torch.Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def header(self) -> tuple[bytes, dict[str, int]]:
        """The bytes before the data, and where in the file each tensor begins."""
        # The largest elements first, so that every tensor is aligned to its own.
        names = sorted(self.tensors, key=lambda name: -self.tensors[name].element_size())
        described: dict[str, Any] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        offsets, at = {}, 0
        for name in names:
            tensor = self.tensors[name]
            if tensor.dtype not in _NAMES:
                raise ConfigError(f"{name!r} is {tensor.dtype}, which safetensors has no name for")
            nbytes = tensor.numel() * tensor.element_size()
            described[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, at + nbytes],
            }
            offsets[name] = at
            at += nbytes
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=True).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        start = 8 + len(text)
        return len(text).to_bytes(8, "little") + text, {name: start + offset for name, offset in offsets.items()}

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def divide_into_files(
    stem: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], *, bytes_max: int | None = None
) -> list[FileLayout]:
    """Divide tensors, in their order, over files of a bounded size, named as transformers names them."""
    limit = FILE_BYTES_MAX if bytes_max is None else bytes_max
    parts: list[dict[str, torch.Tensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if parts[-1] and held + nbytes > limit:
            parts.append({})
            held = 0
        parts[-1][name] = tensor
        held += nbytes
    if len(parts) == 1:
        return [FileLayout(f"{stem}.safetensors", parts[0], metadata)]
    return [
        FileLayout(f"{stem}-{number:05}-of-{len(parts):05}.safetensors", part, metadata)
        for number, part in enumerate(parts, 1)
    ]


class TensorFile:
    """One file being written; the parts of a tensor come in their order."""

    def __init__(self, folder: Path, layout: FileLayout) -> None:
        """Make the file and write its header."""
        self.path = folder / layout.name
        header, self._offsets = layout.header()
        self.nbytes = len(header) + layout.nbytes
        self._written = 0
        self._unflushed = 0
        self._sums = {name: Checksum() for name in layout.tensors}
        self._header_sum = Checksum()
        self._header_sum.update(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        with file_errors(self.path, "cannot be written"):
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._write(header, 0)

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Write contiguous elements of a tensor from element `start` on, which follow what was written of it."""
        if values.numel() == 0:
            return
        self._sums[name].update(values)
        self._write(memory_of(values), self._offsets[name] + start * values.element_size())

    def _write(self, part: bytes | memoryview, offset: int) -> None:
        at = 0
        with file_errors(self.path, "cannot be written"):
            while at < len(part):
                at += os.pwrite(self._descriptor, part[at:], offset + at)
            self._written += at
            self._unflushed += at
            if self._unflushed >= _FLUSH_BYTES:
                self._flush()

    def _flush(self) -> None:
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unflushed = 0

    def finish(self) -> dict[str, Any]:
        """Flush it; what a manifest says of it."""
        assert self._written == self.nbytes, f"{self.path}: {self._written} bytes of {self.nbytes}"
        with file_errors(self.path, "cannot be written"):
            self._flush()
        self.close()
        return {
            "bytes": self.nbytes,
            "header": str(self._header_sum),
            "tensors": {name: str(checksum) for name, checksum in self._sums.items()},
        }

    def close(self) -> None:
        """Let the file go. Twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
