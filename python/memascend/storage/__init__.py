"""Stores training state on SSD and updates it in a pipeline: the Python side of the Rust store and engine.

`Store` and `Engine` subclass the extension's classes. The subclasses add methods that take or return tensors, convert
the extension's tuples and texts to Python values and errors, and make commits together with other ranks. `records`
describes the contents of a store; `formats` describes the formats of optimizer state on storage and converts state to
float32. `memascend.engine` is the public name of this package, and `_core.pyi` documents the extension's own methods.

Invariant: this package or the extension checks every tensor against the record's description (device, dtype, shape,
order of dimensions) before Rust code uses the tensor's memory. The memory stays alive until that code has finished.

This package knows no model, module or optimizer of torch, and makes no plan.
"""

from memascend._core import Checkers as Checkers
from memascend._core import Checksum as Checksum
from memascend._core import Fetch as Fetch
from memascend._core import UnitParts as UnitParts
from memascend._core import checksum_of as checksum_of
from memascend.memory import PAGE_BYTES as PAGE_BYTES
from memascend.storage.engine import Adam as Adam
from memascend.storage.engine import Chunk as Chunk
from memascend.storage.engine import Engine as Engine
from memascend.storage.engine import Momentum as Momentum
from memascend.storage.formats import MIN_8BIT_SIZE as MIN_8BIT_SIZE
from memascend.storage.formats import decode_state as decode_state
from memascend.storage.formats import described_state as described_state
from memascend.storage.formats import state_tensors as state_tensors
from memascend.storage.records import CHUNK_ELEMENTS as CHUNK_ELEMENTS
from memascend.storage.records import Part as Part
from memascend.storage.records import Record as Record
from memascend.storage.records import Sizes as Sizes
from memascend.storage.records import adam_state as adam_state
from memascend.storage.records import chunk_elements_of as chunk_elements_of
from memascend.storage.records import log_bytes as log_bytes
from memascend.storage.records import order_of as order_of
from memascend.storage.records import places_bytes as places_bytes
from memascend.storage.records import sizes as sizes
from memascend.storage.store import Commit as Commit
from memascend.storage.store import NamedCommit as NamedCommit
from memascend.storage.store import Store as Store
from memascend.storage.store import commits as commits
from memascend.storage.store import examine as examine
from memascend.storage.store import look as look
from memascend.storage.store import newest as newest
from memascend.storage.store import pending_file as pending_file
