"""Maps tensors in files to the names and shapes of a transformers model, as transformers itself loads them.

What the hub has as one tensor for each expert, say, is one parameter of the model. transformers knows which, and how.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# What transformers does to experts that a model has as one parameter, and to several such that it has as one.
_STACKED = [("MergeModulelist", 0)]
_JOINED = [("Concatenate", 1)]


class WeightTensor(Protocol):
    """One tensor of weights."""

    def described(self) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """Its dtype, None where torch has none such, and shape."""

    def values(self) -> torch.Tensor:
        """It; on mapped files where that can be."""


# Its name in the files, the pattern that it fits, and itself.
_Named = tuple[str, str, WeightTensor]


class _MergedTensor:
    """A parameter that is made from several tensors, or one of several that are made from one."""

    def __init__(self, name: str, layer: str, converter: Any, config: Any, parts: Sequence[_Named]) -> None:
        """`converter` is transformers', which collects tensors and is copied for that; `parts` are what it is given."""
        self._name = name
        self._layer = layer
        self._converter = converter
        self._config = config
        self._parts = parts

    def names(self) -> list[str]:
        """All that come out, of which this is one."""
        return list(self._all(_on_meta))

    def described(self) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """What comes out of tensors on meta."""
        made = self._made(_on_meta)
        return made.dtype, tuple(made.shape)

    def values(self) -> torch.Tensor:
        """It, in memory: piece after piece where experts are put together, else as transformers computes it."""
        stacked = self._stacked()
        if stacked is None:
            return self._made(lambda source: source.values()).contiguous()
        dtype, shape = self.described()
        whole = torch.empty(shape, dtype=dtype)
        at = 0
        for sources in stacked:
            for number, source in enumerate(sources):
                piece = source.values()
                whole[number].narrow(0, at, piece.shape[0]).copy_(piece)
            at += sources[0].described()[1][0]
        return whole

    def _stacked(self) -> list[list[WeightTensor]] | None:
        """Matrices by pattern, where they are stacked along a new first dimension, and these joined along the next."""
        operations = [(type(each).__name__, getattr(each, "dim", None)) for each in self._converter.operations]
        of_pattern: dict[str, list[WeightTensor]] = {pattern: [] for pattern in self._converter.source_patterns}
        for _, pattern, source in self._parts:
            of_pattern[pattern].append(source)
        pieces = list(of_pattern.values())
        known = operations == _STACKED + _JOINED or (operations == _STACKED and len(pieces) == 1)
        flat = all(len(source.described()[1]) == 2 for _, _, source in self._parts)
        return pieces if known and flat and len({len(sources) for sources in pieces}) == 1 else None

    def _made(self, value_of: Callable[[WeightTensor], torch.Tensor]) -> torch.Tensor:
        made: torch.Tensor | list[torch.Tensor] = self._all(value_of)[self._name]
        return made[0] if isinstance(made, list) else made

    def _all(self, value_of: Callable[[WeightTensor], torch.Tensor]) -> dict[str, Any]:
        converter = copy.deepcopy(self._converter)
        for key, pattern, source in self._parts:
            converter.add_tensor(self._layer, key, pattern, value_of(source))
        made: Any = converter.convert(self._layer, config=self._config)
        # The first versions of transformers 5 tell beside it what went wrong.
        found: dict[str, Any] = made[0] if isinstance(made, tuple) else made
        return found


def convert_names(model: torch.nn.Module, sources: Mapping[str, WeightTensor]) -> dict[str, WeightTensor] | None:
    """The same tensors as the model has them; None where transformers knows nothing of it.

    Raises:
        ConfigError: transformers cannot convert them.
    """
    renamings, converters = _conversions(model)
    if not renamings and not converters:
        return None
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    own = _names(model)
    prefix = getattr(model, "base_model_prefix", None)
    config = getattr(model, "config", None)
    found: dict[str, WeightTensor] = {}
    layers: dict[str, list[_Named]] = {}
    # Experts by their numbers.
    for key in sorted(sources, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if pattern is None:
            found[name] = sources[key]
        else:
            layers.setdefault(name, []).append((key, pattern, sources[key]))
    for layer, parts in layers.items():
        converter = of_pattern[parts[0][1]]
        try:
            names = _MergedTensor(layer, layer, converter, config, parts).names()
        except Exception as error:
            raise ConfigError(
                f"transformers cannot make {layer} from {parts[0][0]} and {len(parts) - 1} more: {error}; give a "
                "function as weights= that returns it"
            ) from error
        found.update({name: _MergedTensor(name, layer, converter, config, parts) for name in names})
    return found


def misread_names(model: torch.nn.Module) -> list[str]:
    """Names of the model that transformers takes for others, where it finds them in a file."""
    renamings, converters = _conversions(model)
    if not renamings and not converters:
        return []
    from transformers.core_model_loading import rename_source_key

    own = _names(model)
    prefix = getattr(model, "base_model_prefix", None)
    return [name for name in own if rename_source_key(name, renamings, converters, prefix, own) != (name, None)]


def _conversions(model: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """What transformers does to the names, and to the tensors, of a file for a model of its own."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return [], []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError:
        # Versions that load files as they are.
        return [], []
    found = get_model_conversion_mapping(model)
    return (
        [each for each in found if isinstance(each, WeightRenaming)],
        [each for each in found if isinstance(each, WeightConverter)],
    )


def _names(model: torch.nn.Module) -> dict[str, bool]:
    return {name: True for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}


def _on_meta(source: WeightTensor) -> torch.Tensor:
    dtype, shape = source.described()
    return torch.empty(shape, dtype=dtype, device="meta")
