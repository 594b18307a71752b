"""Stores training state on SSD and updates it in a pipeline: the Python side of the Rust store and engine.

`Store` and `Engine` are the extension's classes, with methods that read, fill and apply tensors, which needs torch.
`records` describes the contents of a store; `formats` converts state to and from the formats on storage.
`memascend.engine` is the public name of this package, and `_core.pyi` documents the extension's own methods.

Invariant: every tensor that is passed to Rust was checked against the record's description (device, dtype, shape, order
of dimensions), and is kept alive until Rust has finished with it.

Never: this package knows no model, module or optimizer of torch, makes no plan, and does not wrap methods of the
extension that need no torch.
"""

from __future__ import annotations

from memascend._core import Checkers, Checksum, Fetch, UnitParts, checksum_of
from memascend.memory import PAGE_BYTES
from memascend.storage.engine import Adam, Chunk, Engine, Momentum
from memascend.storage.formats import (
    FORMATS,
    MIN_8BIT_SIZE,
    decode_state,
    described_state,
    encode_state,
    state_tensors,
)
from memascend.storage.records import (
    CHUNK_ELEMENTS,
    Part,
    Record,
    Sizes,
    adam_state,
    chunk_elements_of,
    log_bytes,
    order_of,
    sizes,
)
from memascend.storage.store import (
    Commit,
    NamedCommit,
    Store,
    commits,
    examine,
    look,
    pending_file,
)

__all__ = [
    "CHUNK_ELEMENTS",
    "FORMATS",
    "MIN_8BIT_SIZE",
    "PAGE_BYTES",
    "Adam",
    "Checkers",
    "Checksum",
    "Chunk",
    "Commit",
    "Engine",
    "Fetch",
    "Momentum",
    "NamedCommit",
    "Part",
    "Record",
    "Sizes",
    "Store",
    "UnitParts",
    "adam_state",
    "checksum_of",
    "chunk_elements_of",
    "commits",
    "decode_state",
    "described_state",
    "encode_state",
    "examine",
    "log_bytes",
    "look",
    "order_of",
    "pending_file",
    "sizes",
    "state_tensors",
]
