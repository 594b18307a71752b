"""Commits persistent buffers (BatchNorm's statistics, say) with each step; they stay in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend.engine import checksum_of
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from memascend.engine import Entry, Store

# Buffers up to this many bytes in all are written with every step; more are only when they were seen to change.
_ALWAYS_BYTES_MAX = 1 << 20


class Buffers:
    """The persistent buffers of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._owners = {name: (module, short) for name, module, short in persistent_buffers(model)}
        # Checksums of what was committed. A codebook that is written through `.data` counts no writes.
        self._seen: dict[str, str] = {}
        self._staged: dict[str, str] = {}
        self._kinds = {name: _kind(self._tensor(name)) for name in self._owners}
        self._always = sum(self._tensor(name).nbytes for name in self._owners) <= _ALWAYS_BYTES_MAX

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._found(name)
        assert tensor is not None
        return tensor

    def _found(self, name: str) -> torch.Tensor | None:
        module, short = self._owners[name]
        return module._buffers.get(short)  # noqa: SLF001

    @property
    def names(self) -> list[str]:
        """As `state_dict()` names them; of one that the model has no more, storage keeps what was committed."""
        return [name for name in self._owners if self._found(name) is not None]

    def entries(self, entry: type[Entry]) -> list[Entry]:
        """How the store knows them."""
        return [
            entry(name=name, values=self._tensor(name).detach(), state={}, unit="buffers", buffer=True)
            for name in self.names
        ]

    def tensor(self, name: str) -> torch.Tensor:
        """A buffer's values, contiguous in host memory."""
        return self._tensor(name).detach().cpu().contiguous()

    def target(self, name: str) -> torch.Tensor:
        """A buffer itself, to be written to."""
        return self._tensor(name).detach()

    def restore(self, store: Store) -> None:
        """Take the values that the store holds."""
        for name in self.names:
            values, _ = store.read(name)
            with torch.no_grad():
                self._tensor(name).copy_(values)

    def require_same_kinds(self) -> None:
        """Before a step: refuse buffers that storage has no room for any more.

        Raises:
            ConfigError: one has another shape or dtype than when it was offloaded; nothing was changed.
        """
        for name in self.names:
            now, then = _kind(self._tensor(name)), self._kinds[name]
            if now != then:
                raise ConfigError(
                    f"buffer {name!r} is {now[0]} of shape {list(now[1])}, and was {then[0]} of {list(then[1])} when "
                    "the model was offloaded, which its store keeps: set it back, and step() goes on. What changes its "
                    "shape is registered with persistent=False before offload(), or is a plain attribute"
                )

    def stage(self, store: Store, step: int) -> None:
        """Stage those that changed."""
        self._staged = {}
        for name in self.names:
            values = self.tensor(name)
            now = "" if self._always else checksum_of(values)
            if self._always or self._seen.get(name) != now:
                store.discard(name)
                store.stage(name, values, step=step)
                self._staged[name] = now

    def unstage(self, store: Store) -> None:
        """Forget what was staged."""
        for name in self._staged:
            store.discard(name)
        self._staged = {}

    def committed(self) -> None:
        """What was staged is on storage."""
        self._seen.update(self._staged)


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def persistent_buffers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str]]:
    """Each persistent buffer once: its name, its module and its name there."""
    seen: set[int] = set()
    found = []
    for prefix, module in model.named_modules():
        for short, tensor in module._buffers.items():  # noqa: SLF001
            if tensor is None or short in module._non_persistent_buffers_set or id(tensor) in seen:  # noqa: SLF001
                continue
            seen.add(id(tensor))
            found.append((f"{prefix}.{short}" if prefix else short, module, short))
    return found


def move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Let all buffers of a model, persistent or not, be on a device: all of them, or with an exception none."""
    moved: dict[int, torch.Tensor] = {}
    places = []
    for module in model.modules():
        for name, tensor in module._buffers.items():  # noqa: SLF001
            if tensor is not None:
                if id(tensor) not in moved:
                    moved[id(tensor)] = tensor.to(device)
                places.append((module, name, tensor))
    for module, name, tensor in places:
        module._buffers[name] = moved[id(tensor)]  # noqa: SLF001
