"""Writes a Perfetto trace of training: engine events, and above them what the model computed."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from memascend.engine import Engine

__all__ = ["Trace"]


class Trace:
    """Records until `end`; the engine and Python read the same clock."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine, self._path = engine, path
        self._spans: list[dict[str, Any]] = []
        self._began = time.perf_counter()
        engine.trace(path)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What the block does, under a name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spans.append(
                {
                    "ph": "X",
                    "name": name,
                    "pid": os.getpid(),
                    "tid": threading.get_native_id(),
                    "ts": (began - self._began) * 1e6,
                    "dur": (time.perf_counter() - began) * 1e6,
                }
            )

    def end(self) -> None:
        """Close the file, with the spans in it."""
        self._engine.trace_end()
        events = json.loads(self._path.read_text())
        self._path.write_text(json.dumps(events + self._spans))
