"""Stores training state on SSD and updates it in a pipeline: the Python side of the Rust store and engine.

`Store` and `Engine` are the extension's classes; what is added to them here reads, fills and applies tensors, which
needs torch. `entries` describes what a store holds; `formats` converts state into the formats that lie on storage, and
back. `memascend.engine` is the public name of this room; `_core.pyi` documents what the extension gives as it is.

Invariant: every tensor that crosses into Rust was checked against the entry's description (device, dtype, shape, order
of dimensions), and is held until Rust is done with it.

Never: it knows no model, module or optimizer of torch, decides no plan, and wraps nothing that Rust gives as it is.
"""

from __future__ import annotations

from memascend._core import Checkers, Checksum, Fetch, UnitParts, checksum_of
from memascend.memory import PAGE_BYTES
from memascend.storage.engine import Adam, Chunk, Engine, Late, Momentum
from memascend.storage.entries import (
    CHUNK_ELEMENTS,
    Entry,
    Part,
    Sizes,
    adam_state,
    chunk_elements_of,
    log_bytes,
    order_of,
    sizes,
)
from memascend.storage.formats import FORMATS, compact_of, decode_state, encode_state, master_of, state_tensors
from memascend.storage.store import (
    Commit,
    NamedCommit,
    SharedCommits,
    Store,
    commits,
    examine,
    look,
)

__all__ = [
    "CHUNK_ELEMENTS",
    "FORMATS",
    "PAGE_BYTES",
    "Adam",
    "Checkers",
    "Checksum",
    "Chunk",
    "Commit",
    "Engine",
    "Entry",
    "Fetch",
    "Late",
    "Momentum",
    "NamedCommit",
    "Part",
    "SharedCommits",
    "Sizes",
    "Store",
    "UnitParts",
    "adam_state",
    "checksum_of",
    "chunk_elements_of",
    "commits",
    "compact_of",
    "decode_state",
    "encode_state",
    "examine",
    "log_bytes",
    "look",
    "master_of",
    "order_of",
    "sizes",
    "state_tensors",
]
