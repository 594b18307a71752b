"""Loads the weights of a model on meta, from a function or from safetensors files.

Checks files before any of their values is used.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from memascend.checkpoint.files import DTYPES, file_errors, read_bounded
from memascend.checkpoint.quantized import dequantized, method_of, require_plain
from memascend.errors import ConfigError, CorruptionError
from memascend.tensors import same_bits
from memascend.text import expanded, listed

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from memascend.checkpoint.files import Matched, Names


# The operations of transformers' converters that `_stacked()` knows. MergeModulelist stacks the matrices of all
# experts. Concatenate joins several stacks.
_STACKED = [("MergeModulelist", 0)]
_JOINED = [("Concatenate", 1)]


class WeightTensor(Protocol):
    """One tensor of weights.

    `dtype` applies only to quantised tensors; any other tensor keeps the dtype of its file.
    """

    def described(self, dtype: torch.dtype | None = None) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """Returns the dtype and the shape. The dtype is None if torch does not support it."""

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the elements."""


# A tensor's name in the files, the pattern of the converter that matches this name, and the tensor.
_Named = tuple[str, str, WeightTensor]


@dataclass(frozen=True)
class _MergedTensor:
    """A parameter that a converter of transformers makes from tensors in files.

    One conversion may make several parameters.
    """

    name: str
    layer: str  # the name under which the converter collects the parts
    converter: Any  # the converter of transformers; each use copies it, because a converter collects tensors
    config: Any
    parts: Sequence[_Named]  # the converter's inputs

    def names(self) -> list[str]:
        """Returns the names of all tensors that the conversion makes. This includes `self.name`."""
        return list(self._all(_on_meta))

    def described(self, dtype: torch.dtype | None = None) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """Returns the dtype and the shape. Converts tensors on meta to find the dtype and the shape."""
        made = self._made(lambda source: _on_meta(source, dtype))
        return made.dtype, tuple(made.shape)

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the elements, in memory.

        Copies stacked experts one by one; transformers does any other conversion.
        """
        stacked = self._stacked()
        if stacked is None:
            return self._made(lambda source: source.values(dtype)).contiguous()
        of, shape = self.described(dtype)
        whole = torch.empty(shape, dtype=of)
        at = 0
        for sources in stacked:
            for number, source in enumerate(sources):
                piece = source.values(dtype)
                whole[number].narrow(0, at, piece.shape[0]).copy_(piece)
            at += sources[0].described()[1][0]
        return whole

    def _stacked(self) -> list[list[WeightTensor]] | None:
        """Returns the experts' matrices, one list per pattern. Returns None for any conversion but the supported one.

        The supported conversion stacks the matrices of a pattern along a new first dimension, and joins the stacks of
        several patterns along the second dimension.
        """
        operations = [(type(each).__name__, getattr(each, "dim", None)) for each in self.converter.operations]
        of_pattern: dict[str, list[WeightTensor]] = {pattern: [] for pattern in self.converter.source_patterns}
        for _, pattern, source in self.parts:
            of_pattern[pattern].append(source)
        pieces = list(of_pattern.values())
        known = operations == _STACKED + _JOINED or (operations == _STACKED and len(pieces) == 1)
        flat = all(len(source.described()[1]) == 2 for _, _, source in self.parts)
        return pieces if known and flat and len({len(sources) for sources in pieces}) == 1 else None

    def _made(self, value_of: Callable[[WeightTensor], torch.Tensor]) -> torch.Tensor:
        """Converts the tensors that `value_of` returns for the parts. Returns the parameter `self.name`."""
        made: torch.Tensor | list[torch.Tensor] = self._all(value_of)[self.name]
        return made[0] if isinstance(made, list) else made

    def _all(self, value_of: Callable[[WeightTensor], torch.Tensor]) -> dict[str, Any]:
        """Converts the tensors that `value_of` returns for the parts. Returns all resulting tensors, by name."""
        converter = copy.deepcopy(self.converter)
        for key, pattern, source in self.parts:
            converter.add_tensor(self.layer, key, pattern, value_of(source))
        made: Any = converter.convert(self.layer, config=self.config)
        # In the first versions of transformers 5, `convert()` returns a tuple: first the tensors, then the errors.
        found: dict[str, Any] = made[0] if isinstance(made, tuple) else made
        return found


def convert_names(model: torch.nn.Module, sources: Mapping[str, WeightTensor]) -> dict[str, WeightTensor] | None:
    """Converts tensors of files to tensors with the model's names.

    Returns None if transformers has no conversion for the model.

    Raises:
        ConfigError: transformers cannot convert the tensors.
    """
    rename, converters = _renaming(model)
    if rename is None:
        return None
    from transformers.core_model_loading import dot_natural_key

    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    config = getattr(model, "config", None)
    found: dict[str, WeightTensor] = {}
    layers: dict[str, list[_Named]] = {}
    # Sort names with numbers in numerical order, so that the experts are in order.
    for key in sorted(sources, key=dot_natural_key):
        name, pattern = rename(key)
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
                f"transformers cannot make {layer} from {parts[0][0]} and {len(parts) - 1} more tensors: {error}. Pass "
                f"as weights= a function that returns {layer}"
            ) from error
        found.update({name: _MergedTensor(name, layer, converter, config, parts) for name in names})
    return found


def misread_names(model: torch.nn.Module) -> list[str]:
    """Returns the names in the model that transformers would rename if a file had tensors with these names."""
    rename, _ = _renaming(model)
    return [] if rename is None else [name for name in _names(model) if rename(name) != (name, None)]


def _renaming(model: torch.nn.Module) -> tuple[Callable[[str], tuple[str, str | None]] | None, list[Any]]:
    """Returns the function by which transformers renames tensors of files for this model, and the model's converters.

    The function returns a tensor's new name and the pattern of the converter for this tensor. The pattern is None if no
    converter uses the tensor. Instead of the function, returns None if transformers renames nothing.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None, []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        # Older versions of transformers load files without renaming.
        return None, []
    found = get_model_conversion_mapping(model)
    renamings = [each for each in found if isinstance(each, WeightRenaming)]
    converters = [each for each in found if isinstance(each, WeightConverter)]
    if not renamings and not converters:
        return None, []
    own, prefix = dict.fromkeys(_names(model), True), getattr(model, "base_model_prefix", None)
    return lambda key: rename_source_key(key, renamings, converters, prefix, own), converters


def _names(model: torch.nn.Module) -> list[str]:
    return [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]


def _on_meta(source: WeightTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a tensor on meta that has the dtype and the shape of `source`."""
    of, shape = source.described(dtype)
    return torch.empty(shape, dtype=of, device="meta")


_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def open_weights(weights: str | os.PathLike[str] | Callable[[str, torch.Tensor], torch.Tensor]) -> Weights:
    """Opens the argument of `offload(weights=)`. `Options` has checked the argument's type."""
    return WeightFunction(weights) if callable(weights) else WeightFiles(Path(expanded(weights)))


class WeightFunction:
    """The user's function (name, tensor on meta) -> values. Each call is for one parameter or buffer."""

    def __init__(self, function: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        self._function = function

    def has(self, name: str) -> bool:
        """Always returns True: the user's function must return each buffer that the model cannot compute."""
        del name
        return True

    def tensor(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Calls the user's function, and checks the returned tensor.

        Raises:
            ConfigError: the function did not return a dense tensor that has values, and the shape and dtype of `like`.
        """
        values = self._function(name, like)
        if not isinstance(values, torch.Tensor) or values.layout != torch.strided or values.is_meta:
            is_tensor = isinstance(values, torch.Tensor)
            kind = f"{values.layout} on {values.device}" if is_tensor else type(values).__name__
            raise ConfigError(f"weights({name!r}, ...) must return a dense tensor with values, but returned {kind}")
        if values.shape != like.shape or values.dtype != like.dtype:
            raise ConfigError(
                f"weights({name!r}, ...) returned {_described(values)}, not {_described(like)}. Return a tensor of "
                "the second dtype and shape; values.to(dtype) converts the dtype"
            )
        return values.detach().cpu()


# The attribute of a parameter on meta that holds its `Source`.
_SOURCE = "_memascend_source"
# peft can train a copy of a module. This pattern matches the part of a parameter's name that names the copy. The
# parameter of the original module has "original_module" in its name instead.
_COPIED = re.compile(r"\.modules_to_save\.[^.]+\.")


@dataclass(frozen=True)
class Source:
    """The source of the values of a parameter on meta: files, a key in the files, and the dtype of the loaded model."""

    files: WeightFiles
    key: str
    dtype: torch.dtype

    def note(self, parameter: torch.Tensor) -> None:
        """Stores this source as an attribute of a parameter on meta, where `sources_of()` finds it."""
        setattr(parameter, _SOURCE, self)

    def values(self) -> torch.Tensor:
        """Returns the elements, in `self.dtype`."""
        return self.files.at(self.key, self.dtype).to(self.dtype)


def sources_of(model: torch.nn.Module) -> Callable[[str, torch.Tensor], torch.Tensor] | None:
    """Returns a function for `offload(weights=)` that reads the sources of parameters; None if there are no sources.

    Raises:
        ConfigError: some parameters have a source, but another parameter on meta has no source, or the shape of its
            source differs from the parameter's shape.
    """
    named = dict(model.named_parameters())
    noted: dict[str, Source] = {name: vars(p)[_SOURCE] for name, p in named.items() if _SOURCE in vars(p)}
    if not noted:
        return None
    found = {}
    for name, parameter in named.items():
        if not parameter.is_meta:
            continue
        source = noted.get(name) or noted.get(_COPIED.sub(".original_module.", name))
        if source is None or source.files.on_meta(source.key).shape != parameter.shape:
            path = next(iter(noted.values())).files.path
            raise ConfigError(
                f"{name} has no values: it is on meta, and loading() found no weights of its shape for it in {path} "
                "(this happens with resized embeddings, and with adapters that start from the weights). Save a model "
                f"that has {name} and load that model, or make the model outside of loading()"
            )
        found[name] = source

    def values(name: str, like: torch.Tensor) -> torch.Tensor:
        source = found[name]
        return source.values().to(like.dtype)

    return values


def first_rows(parameter: torch.Tensor, count: int) -> torch.Tensor | None:
    """Returns the first rows of a parameter.

    If the parameter is on meta, reads the rows from the parameter's source. Returns None if the parameter has no
    source.
    """
    if not parameter.is_meta:
        return parameter.detach()[:count]
    source: Source | None = vars(parameter).get(_SOURCE)
    return None if source is None else source.values()[:count].to(parameter.dtype)


def forget_sources(parameters: Iterable[torch.Tensor]) -> None:
    """Removes the sources of parameters whose values are in a store, so that the files can be closed."""
    for parameter in parameters:
        vars(parameter).pop(_SOURCE, None)


class WeightFiles:
    """One safetensors file, or a folder of safetensors files. Tensors are views of the mapped files where possible.

    Dequantises a quantised tensor at each read.
    """

    def __init__(
        self, path: Path, names: Sequence[str] | None = None, *, method: Mapping[str, Any] | None = None
    ) -> None:
        """Opens the file or the folder `path`. With `names`, opens only the files of these names in the folder `path`.

        `method`: the `quantization_config` of the weights; None to use the entry in config.json, if there is one.

        Raises:
            ConfigError: no safetensors file is found, a file or a tensor that the index names is missing, a file is not
                a regular file, or the quantisation of the weights is not supported.
            CorruptionError: a file is damaged or incomplete.
            StorageError: a file cannot be read.
        """
        self.path = path
        # The name of a tensor in the files -> the tensor. `matched()` may replace these entries by tensors that
        # transformers converted; these tensors have the model's names.
        self._where: dict[str, WeightTensor] = {}
        # The model's name of a tensor -> the tensor's key in `_where`. `check()` and `find()` fill this dict.
        self._of: dict[str, str] = {}
        for file, keys in _files(path) if names is None else [(path / name, None) for name in names]:
            opened = _opened(file)
            there = dict.fromkeys(opened.keys())
            lost = [key for key in keys or () if key not in there]
            if lost:
                raise ConfigError(
                    f"according to {path}, the tensor {lost[0]!r} is in {file.name}, but this file does not have the "
                    "tensor. Download the index and the file again"
                )
            self._where.update({key: _FileTensor(opened, key) for key in (there if keys is None else keys)})
        folder = path if path.is_dir() else path.parent
        method = method or method_of(folder)
        if method is None:
            require_plain(self._where, folder)
        else:
            self._where = dequantized(self._where, method, folder)

    @property
    def keys(self) -> list[str]:
        """The names of the tensors in the files."""
        return list(self._where)

    def check(self, names: Names, wanted: Mapping[str, torch.Tensor]) -> None:
        """Requires that the files have all tensors in `wanted`, with their shapes and dtypes.

        Rejects files with tensors that the model does not have.

        Raises:
            ConfigError: a tensor is missing, unexpected, or has another shape or dtype. Or the files have different
                values for parameters that the model ties.
        """
        found = self.matched(names)
        missing = [name for name in wanted if name not in found.of]
        problems = [_problem("missing in the files", missing), _problem("not in the model", found.unexpected)]
        unfit = []
        for name, like in wanted.items():
            for key in found.of.get(name, ()):
                dtype, shape = self._where[key].described(like.dtype)
                if shape != tuple(like.shape) or dtype != like.dtype:
                    named = "of a dtype that torch does not support" if dtype is None else str(dtype)[len("torch.") :]
                    unfit.append(f"{key} is {named} of shape {list(shape)}, not {_described(like)}")
            if name in found.of:
                self._of[name] = found.of[name][0]
        problems.append(_problem("of another shape or dtype (a function as weights= can convert)", unfit))
        if not unfit:
            problems.append(_untying(found, self._untied(found, wanted)))
        problems = [problem for problem in problems if problem]
        if problems:
            raise ConfigError(
                f"{self.path} does not fit the model; {'; '.join(problems)}. Pass the files of this model, or pass a "
                "function as weights="
            )
        # Also record non-persistent buffers, because files may have their values.
        self._record(found)

    def find(self, names: Names) -> None:
        """Finds the tensors of the model in the files. `check()` also does this; a resume does not call `check()`."""
        self._record(self.matched(names))

    def _record(self, found: Matched) -> None:
        self._of.update({name: keys[0] for name, keys in found.of.items() if name not in self._of})

    def matched(self, names: Names) -> Matched:
        """Matches the names in the files with the model's names.

        If more names match after a conversion by transformers, uses the converted tensors.
        """
        found = names.matched(self._where)
        if not names.left(found):
            return found
        others = convert_names(names.model, self._where)
        if others is not None and names.left(converted_too := names.matched(others)) < names.left(found):
            self._where = others
            return converted_too
        return found

    def _untied(self, found: Matched, wanted: Collection[str]) -> list[tuple[str, str]]:
        """Returns pairs of names in the files whose values differ, although the model ties both names to one tensor."""
        pairs = [(keys[0], key) for name, keys in found.of.items() if name in wanted for key in keys[1:]]
        return [(first, other) for first, other in pairs if not same_bits(self.at(first), self.at(other))]

    def has(self, name: str) -> bool:
        """True if the files have the tensor. Call `check()` or `find()` before this method."""
        return name in self._of

    def tensor(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Returns the values of the tensor that the model calls `name`, as a view of the mapped file where possible.

        Raises:
            ConfigError: the tensor and `like` differ in shape or dtype.
        """
        values = self.at(self._of[name], like.dtype)
        if values.shape != like.shape or values.dtype != like.dtype:
            raise ConfigError(
                f"{self._of[name]} is {_described(values)}, not {_described(like)}. Pass the files of this model, or "
                "pass as weights= a function that converts"
            )
        return values

    def at(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a tensor by its name in the files.

        The tensor is a view of the mapped file where possible. A converted or quantised tensor is a copy.
        """
        return self._where[key].values(dtype)

    def on_meta(self, key: str) -> torch.Tensor:
        """Returns the tensor with the key `key` in `_where`, on meta."""
        return _on_meta(self._where[key])


@dataclass(frozen=True)
class _FileTensor:
    """A tensor in a safetensors file. Its values are not converted."""

    file: Any
    key: str

    def described(self, dtype: torch.dtype | None = None) -> tuple[torch.dtype | None, tuple[int, ...]]:
        del dtype
        part = self.file.get_slice(self.key)
        return DTYPES.get(part.get_dtype()), tuple(part.get_shape())

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the elements as a view of the mapped file, or as a copy if they are not aligned."""
        del dtype
        values: torch.Tensor = self.file.get_tensor(self.key)
        # In files that other programs wrote, a tensor may begin at any byte.
        return values.clone() if values.data_ptr() % values.element_size() else values


# The types that `open_weights()` can return.
Weights = WeightFunction | WeightFiles


def _files(path: Path) -> list[tuple[Path, list[str] | None]]:
    """Returns each file to open, with the names of the tensors to read from the file; None to read all tensors."""
    if path.is_file():
        return _indexed(path) if path.name.endswith(".index.json") else [(path, None)]
    if not path.is_dir():
        raise ConfigError(
            f"weights={str(path)!r} {'is neither a file nor a folder' if path.exists() else 'does not exist'}. Pass a "
            "safetensors file, or a folder of such files with their index"
        )
    if (path / _INDEX).is_file():
        return _indexed(path / _INDEX)
    if (path / _SINGLE).is_file():
        return [(path / _SINGLE, None)]
    indexes = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    if len(indexes) == 1:
        return _indexed(indexes[0])
    if len(files) == 1:
        return [(files[0], None)]
    raise _without_weights(path, files)


def _without_weights(path: Path, files: list[Path]) -> ConfigError:
    """Returns the error for a folder without usable safetensors files. It may say how to convert the folder's files."""
    what = (
        f"weights must be one safetensors file, or several with an index: {path} has {len(files)} safetensors files, "
        f"but no {_INDEX}"
        if files
        else f"weights must be one safetensors file, or several with an index: {path} has no safetensors files"
    )
    if any(path.glob("shard-*.safetensors")):
        what += (
            ". Its shards were written by several ranks with torch.distributed.checkpoint, and memascend does not join "
            "shards. Join them in one process: call "
            "torch.distributed.checkpoint.load(state, storage_reader=HuggingFaceStorageReader(folder), no_dist=True) "
            "with the state dict of a plain model, and save this model with safetensors.torch.save_model()"
        )
    elif not files and any(path.glob("*.distcp")):
        what += (
            ". It has files of torch.distributed.checkpoint, which memascend does not read. Convert them with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, 'all.pt'), and save the weights in "
            "torch.load('all.pt') with safetensors.torch.save_file()"
        )
    elif not files and (any(path.glob("*.bin")) or any(path.glob("*.pt*"))):
        what += ". It has pickled files, which memascend does not read. Convert them with safetensors.torch.save_file()"
    return ConfigError(what)


def _indexed(index: Path) -> list[tuple[Path, list[str] | None]]:
    """Returns each file that an index names, with the names of the tensors to read from the file."""
    with file_errors(index, "cannot be read"):
        _require_file(index)
    try:
        places = json.loads(read_bounded(index, "index of safetensors files. Download it again"))["weight_map"]
        well = isinstance(places, dict) and all(isinstance(file, str) for file in places.values())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptionError(
            f"{index} is not an index of safetensors files ({error}). Download it again", path=str(index)
        ) from error
    if not well or any(Path(file).name != file for file in places.values()):
        raise CorruptionError(
            f"{index} names files in another folder, or entries that are not file names. Download the model again",
            path=str(index),
        )
    keys: dict[Path, list[str]] = {}
    for key, file in places.items():
        keys.setdefault(index.parent / file, []).append(key)
    missing = [file.name for file in keys if not file.is_file()]
    if missing:
        raise ConfigError(_problem(f"files that the index names are missing in {index.parent}. Download them", missing))
    return [*keys.items()]


def _opened(file: Path) -> Any:
    try:
        with file_errors(file, "cannot be read"):
            _require_file(file)
            return safe_open(file, framework="pt").__enter__()  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise CorruptionError(
            f"{file} is not a complete safetensors file ({error}). Download it again",
            path=str(file),
            nbytes=file.stat().st_size,
        ) from error


def _require_file(path: Path) -> None:
    """Rejects a path that is not a regular file. The open() of a named pipe without a writer would block forever."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a regular file, so weights cannot be read from it. Remove it from the folder")


def _problem(what: str, names: list[str]) -> str:
    return f"{what}: {listed(names)}" if names else ""


def _untying(found: Matched, untied: list[tuple[str, str]]) -> str:
    """Describes parameters that the model ties although the files have different values for them.

    Flan-T5's LM head is an example. If the model has two names for the parameter, the text includes the code that
    unties them.

    Returns "" if `untied` is empty.
    """
    if not untied:
        return ""
    problem = _problem(
        "one parameter of the model, but different values in the files", [" and ".join(pair) for pair in untied]
    )
    remedies = []
    for first, other in untied:
        module, _, last = found.named[other].rpartition(".")
        if found.named[other] != found.named[first]:
            place = f'model.get_submodule("{module}").{last}'
            remedies.append(f"{place} = torch.nn.Parameter(torch.empty_like({place}))")
    how = ". Replace one of them by a separate parameter, as from_pretrained() does, before you make the optimizer"
    return f"{problem}{how}: `{'; '.join(remedies)}`" if remedies else problem


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
