"""Trains one of the two runs of `memascend demo` in its own process, a step for each line "step" on standard input."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memascend.cli import process
from memascend.cli.demo import LENGTH, ROWS, Settings
from memascend.errors import MemascendError
from memascend.session.offload import offload
from memascend.tensors import memory_of

if TYPE_CHECKING:
    from memascend.session.optimizer import OffloadedOptimizer


_TEXT_BYTES_MAX = 4 << 20


def read_text() -> torch.Tensor:
    """Returns bytes of Python's licence and sources, or of torch's sources. Each call returns the same bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    # Some Pythons have their standard library in an archive instead of files. With such a Python, the text is torch's
    # sources.
    files = sorted(library.glob("*.py")) or sorted(Path(torch.__file__).parent.glob("*.py"))
    text = bytearray()
    for file in [*library.glob("LICENSE*"), *files]:
        if len(text) >= _TEXT_BYTES_MAX:
            break
        text += file.read_bytes()
    return torch.frombuffer(text[:_TEXT_BYTES_MAX], dtype=torch.uint8)


def batch(text: torch.Tensor, step: int, rows: int, length: int) -> torch.Tensor:
    """Returns the batch of a step: `rows` texts of `length + 1` bytes. The last byte of a text is only a target."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()


_BYTES = 256
_HEAD_WIDTH = 64


class ByteModel(nn.Module):
    """A decoder for bytes, with embeddings, blocks and an LM head. A block has attention and two linear layers."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _BYTES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the loss of predicting each byte from the bytes before it."""
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        hidden = self.bytes(given) + self.places(torch.arange(given.shape[1]))
        for block in self.blocks:
            # Both runs use activation checkpointing, so that activations take little of the compared memory.
            hidden = checkpoint(block, hidden, use_reentrant=False)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // _HEAD_WIDTH)
        self.norm1 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, length, width = hidden.shape
        parts = self.mix(self.norm1(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.join(mixed.transpose(1, 2).reshape(rows, length, width))
        wide: torch.Tensor = self.widen(self.norm2(hidden))
        narrow: torch.Tensor = self.narrow(functional.gelu(wide))
        return hidden + narrow


_LR = 1e-3


def main() -> None:
    """Trains a step for each line "step" on standard input. Ends at any other line, or at the end of the input."""
    settings = Settings(**json.loads(sys.argv[1]))
    try:
        _train(settings)
    except MemascendError as error:
        _answer(error=str(error))


def _train(settings: Settings) -> None:
    # On one thread, the results of torch's fused AdamW and of memascend's AdamW are bit-identical.
    torch.set_num_threads(1)
    text = read_text()
    _warm_up()
    imported = process.resident()
    torch.manual_seed(0)
    model: torch.nn.Module = ByteModel(settings.layers, settings.width, LENGTH)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
    offloaded: OffloadedOptimizer | None = None
    if settings.storage is not None:
        model, offloaded = offload(model, optimizer, storage=settings.storage, existing="resume", device="cpu")
        optimizer = offloaded
    with contextlib.suppress(OSError):
        # Some containers forbid restart_peak(). There, the reported peak may be a peak of the imports.
        process.restart_peak()
    done = offloaded.steps if offloaded else 0
    last = (offloaded.user_state or {}) if offloaded else {}
    count = sum(parameter.numel() for parameter in model.parameters())
    _answer(steps=done, last_loss=last.get("loss"), parameters=count)
    for line in sys.stdin:
        if line.strip() != "step":
            break
        began = time.perf_counter()
        loss = model(batch(text, done, ROWS, LENGTH))
        loss.backward()
        if offloaded:
            offloaded.user_state = {"loss": loss.item()}
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        seconds = time.perf_counter() - began
        held, peak = (max(0, bytes_now - imported) for bytes_now in (process.resident(), process.resident_peak()))
        _answer(step=done, loss=loss.item(), seconds=seconds, held=held, peak=peak)
    _answer(digest=_digest(model), disk=offloaded.plan.disk_bytes if offloaded else 0)


def _warm_up() -> None:
    """Trains a tiny model. torch allocates its fixed memory here, before `_train` measures `imported`."""
    model = ByteModel(1, 64, 16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.zeros((1, 17), dtype=torch.long)).backward()
    optimizer.step()


def _digest(model: torch.nn.Module) -> str:
    hasher = hashlib.sha256()
    for tensor in model.state_dict().values():
        hasher.update(memory_of(tensor))
    return hasher.hexdigest()


def _answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
