"""Stores training state on SSD and updates it in a pipeline: the thin Python layer over the Rust store and engine.

Without a model around it::

    store = engine.Store.create(path, [engine.Entry(name="weight", values=weight, state=engine.adam_state(weight))])
    with engine.Engine(store) as updates:
        updates.update("weight", gradient, engine.Adam(lr=1e-3, step=1))
        updates.commit(1)
"""

from __future__ import annotations

from memascend.engine.checksum import Checksum, checksum_of
from memascend.engine.chunk import Chunk
from memascend.engine.compact import compact_of, master_of
from memascend.engine.engine import Adam, Engine, Late, Momentum
from memascend.engine.entries import (
    CHUNK_ELEMENTS,
    Entry,
    Sizes,
    adam_state,
    chunk_elements_of,
    log_bytes,
    order_of,
    sizes,
)
from memascend.engine.examination import Commit, NamedCommit, commits, examine, look
from memascend.engine.fetch import Checkers, Fetch, UnitParts
from memascend.engine.formats import FORMATS, decode_state, encode_state, state_tensors
from memascend.engine.scan import Part
from memascend.engine.shared_commits import SharedCommits
from memascend.engine.store import Store
from memascend.pages import PAGE_BYTES

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
