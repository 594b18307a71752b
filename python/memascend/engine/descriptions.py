"""Describes the entries of a store, and checks tensors against that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.engine.ffi import Lent, place_of, require, require_laid_out, require_order, stored_order
from memascend.engine.formats import encode_state
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch


class Descriptions:
    """The entries of a store: "dtype", "shape", "order", "spill", "compact", "format" and "state" of each."""

    __slots__ = ("_entries", "_names")

    def __init__(self, entries: Iterable[dict[str, Any]]) -> None:
        self._names: dict[str, int] = {}
        # One for all that are alike by type and shape: a model has thousands of some tens of kinds.
        self._entries: list[dict[str, Any]] = []
        kinds: dict[str, dict[str, Any]] = {}
        for index, entry in enumerate(entries):
            self._names[entry["name"]] = index
            kind = {name: entry[name] for name in ("dtype", "shape", "order", "spill", "compact", "format", "state")}
            self._entries.append(kinds.setdefault(repr(kind), kind))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._entries[index]

    def index(self, name: str) -> int:
        """The number of an entry."""
        if name not in self._names:
            raise ConfigError(f"the store has no entry {name!r}")
        return self._names[name]

    def gradient(self, name: str, gradient: torch.Tensor | Lent) -> int:
        """The number of an entry that this is a gradient of, or an error."""
        index = self.index(name)
        entry = self._entries[index]
        if isinstance(gradient, Lent):
            gradient = gradient.tensor
            require_order(name, gradient, entry["order"])
        else:
            require_laid_out(name, gradient, entry["order"])
        if list(gradient.shape) != entry["shape"]:
            raise ConfigError(f"the gradient of {name!r} has shape {list(gradient.shape)}, not {entry['shape']}")
        return index

    def live(self, name: str, values: torch.Tensor | None) -> tuple[int, int, object] | None:
        """Where the values of an entry are that an update starts from."""
        if values is None:
            return None
        entry = self._entries[self.index(name)]
        require(name, values, entry["dtype"], entry["shape"], entry["order"])
        return place_of(values)

    def tensors(self, name: str, values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """All tensors of an entry in the order in which they are stored; what its format narrows may be in float32."""
        entry = self._entries[self.index(name)]
        if entry["format"]:
            state = encode_state(values, state, entry["format"])
        wanted = [of for of, _, _ in entry["state"]]
        if sorted(state) != sorted(wanted):
            raise ConfigError(f"the state of {name!r} is {wanted}, not {list(state)}")
        tensors = [values, *(state[of] for of in wanted)]
        described = [(entry["dtype"], entry["shape"]), *((dtype, shape) for _, dtype, shape in entry["state"])]
        for tensor, (dtype, shape) in zip(tensors, described, strict=True):
            require(name, tensor, dtype, shape, stored_order(entry, shape))
        return tensors

    def room(self, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Tensors for an entry's values and state, in the order of dimensions in which they are stored."""
        import torch

        entry = self._entries[self.index(name)]

        def empty(dtype: str, shape: list[int]) -> torch.Tensor:
            order = stored_order(entry, shape) or tuple(range(len(shape)))
            laid_out = torch.empty([shape[dim] for dim in order], dtype=getattr(torch, dtype), device="cpu")
            return laid_out.permute([order.index(dim) for dim in range(len(shape))])

        return empty(entry["dtype"], entry["shape"]), {of: empty(dtype, shape) for of, dtype, shape in entry["state"]}
