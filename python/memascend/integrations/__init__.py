"""Plugins for Axolotl and ms-swift: programs that make the Trainer themselves, from their own settings."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError
from memascend.session import offload as session_offload
from memascend.trainer import offload

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["offload", "options_of"]


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the options of `memascend.trainer.offload()` in a program's settings; returns a copy of the options.

    Raises:
        ConfigError: an option is unknown, or `storage` is missing.
    """
    functions = (offload, session_offload.offload)
    known = {
        name
        for function in functions
        for name, one in inspect.signature(function).parameters.items()
        if one.kind is one.KEYWORD_ONLY
    }
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ConfigError(f"memascend has no option {unknown[0]!r}: its options are {', '.join(sorted(known))}")
    if not given.get("storage"):
        raise ConfigError("memascend needs storage, the path of the store: set this option, for example to run.store")
    return dict(given)
