"""Matches names in files with a model's tensors: tied ones, and a base model's prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch


@dataclass(frozen=True)
class Matched:
    """How the names of files match."""

    # By the model's first name of a tensor, the names in the files that are meant; that first name before others.
    of: dict[str, list[str]]
    unexpected: list[str]  # names in the files that the model has nothing for
    named: dict[str, str]  # by the names in the files, those that the model has for the same, first or tied


class Names:
    """All names of a model's tensors; a tied one's first name stands for it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._first: dict[str, str] = {}
        # Names beside the first, and that.
        self.tied: dict[str, str] = {}
        # What is not in a state dict, and in some files all the same.
        self._unsaved: set[str] = set()
        prefix = getattr(model, "base_model_prefix", None)
        self._base = prefix if isinstance(prefix, str) and prefix else None
        seen: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._first[name] = seen.setdefault(id(parameter), name)
            if self._first[name] != name:
                self.tied[name] = self._first[name]
        for prefix, module in model.named_modules():
            for short, buffer in module._buffers.items():  # noqa: SLF001
                if buffer is None:
                    continue
                name = f"{prefix}.{short}" if prefix else short
                self._first[name] = seen.setdefault(id(buffer), name)
                if short in module._non_persistent_buffers_set:  # noqa: SLF001
                    self._unsaved.add(name)
                elif self._first[name] != name:
                    self.tied[name] = self._first[name]

    def matched(self, keys: Collection[str]) -> Matched:
        """Match the names in files: as they are, or with a prefix more or less, whichever leaves fewest over."""
        best = self._with(keys, None)
        if self.left(best):
            for prefix in self._prefixes(keys):
                found = self._with(keys, prefix)
                if self.left(found) < self.left(best):
                    best = found
        return best

    def left(self, found: Matched) -> int:
        """How many names are left over, on both sides."""
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
