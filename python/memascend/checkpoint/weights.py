"""Loads weights for a model on "meta": safetensors files, checked before anything is written, or a function."""

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


# How transformers makes one parameter of all experts, and joins several such parameters into one.
_STACKED = [("MergeModulelist", 0)]
_JOINED = [("Concatenate", 1)]


class WeightTensor(Protocol):
    """One tensor of weights. `dtype` is the one to dequantise to; what is not quantised is as the files have it."""

    def described(self, dtype: torch.dtype | None = None) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """Its dtype (None where torch has none such) and shape."""

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Its elements."""


# Its name in the files, the pattern that it fits, and itself.
_Named = tuple[str, str, WeightTensor]


@dataclass(frozen=True)
class _MergedTensor:
    """A parameter that is made from several tensors, or one of several that are made from one."""

    name: str
    layer: str
    converter: Any  # of transformers, which collects tensors and is copied for that
    config: Any
    parts: Sequence[_Named]  # what the converter is given

    def names(self) -> list[str]:
        """The names of all tensors that the conversion makes; this is one of them."""
        return list(self._all(_on_meta))

    def described(self, dtype: torch.dtype | None = None) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """Dtype and shape that the conversion gives for tensors on meta."""
        made = self._made(lambda source: _on_meta(source, dtype))
        return made.dtype, tuple(made.shape)

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Its elements, in memory: experts are copied one by one, all else is computed by transformers."""
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
        """Matrices by pattern, where they are stacked along a new first dimension, and these joined along the next."""
        operations = [(type(each).__name__, getattr(each, "dim", None)) for each in self.converter.operations]
        of_pattern: dict[str, list[WeightTensor]] = {pattern: [] for pattern in self.converter.source_patterns}
        for _, pattern, source in self.parts:
            of_pattern[pattern].append(source)
        pieces = list(of_pattern.values())
        known = operations == _STACKED + _JOINED or (operations == _STACKED and len(pieces) == 1)
        flat = all(len(source.described()[1]) == 2 for _, _, source in self.parts)
        return pieces if known and flat and len({len(sources) for sources in pieces}) == 1 else None

    def _made(self, value_of: Callable[[WeightTensor], torch.Tensor]) -> torch.Tensor:
        made: torch.Tensor | list[torch.Tensor] = self._all(value_of)[self.name]
        return made[0] if isinstance(made, list) else made

    def _all(self, value_of: Callable[[WeightTensor], torch.Tensor]) -> dict[str, Any]:
        converter = copy.deepcopy(self.converter)
        for key, pattern, source in self.parts:
            converter.add_tensor(self.layer, key, pattern, value_of(source))
        made: Any = converter.convert(self.layer, config=self.config)
        # The first versions of transformers 5 return errors beside it.
        found: dict[str, Any] = made[0] if isinstance(made, tuple) else made
        return found


def convert_names(model: torch.nn.Module, sources: Mapping[str, WeightTensor]) -> dict[str, WeightTensor] | None:
    """The same tensors under the model's names; None if transformers has no conversion for the model."""
    rename, converters = _renaming(model)
    if rename is None:
        return None
    from transformers.core_model_loading import dot_natural_key

    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    config = getattr(model, "config", None)
    found: dict[str, WeightTensor] = {}
    layers: dict[str, list[_Named]] = {}
    # Experts in the order of their numbers.
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
                f"transformers cannot make {layer} from {parts[0][0]} and {len(parts) - 1} more: {error}; give a "
                "function as weights= that returns it"
            ) from error
        found.update({name: _MergedTensor(name, layer, converter, config, parts) for name in names})
    return found


def misread_names(model: torch.nn.Module) -> list[str]:
    """Names of the model that transformers would rename if it found them in a file."""
    rename, _ = _renaming(model)
    return [] if rename is None else [name for name in _names(model) if rename(name) != (name, None)]


def _renaming(model: torch.nn.Module) -> tuple[Callable[[str], tuple[str, str | None]] | None, list[Any]]:
    """How transformers renames what a file has for a model of its own (None: not at all), and its converters.

    Renaming returns the new name, and the pattern of the converter that takes the tensor, if any.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None, []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        # Versions that load files as they are.
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
    of, shape = source.described(dtype)
    return torch.empty(shape, dtype=of, device="meta")


_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def open_weights(weights: str | os.PathLike[str] | Callable[[str, torch.Tensor], torch.Tensor]) -> Weights:
    """What `offload(weights=)` was given, which its options have checked."""
    return WeightFunction(weights) if callable(weights) else WeightFiles(Path(expanded(weights)))


class WeightFunction:
    """A function that is given a name and a parameter on meta, and returns its values; called one at a time."""

    def __init__(self, function: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        self._function = function

    def has(self, name: str) -> bool:
        """True: the function is called for every buffer that the model cannot compute."""
        del name
        return True

    def tensor(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The tensor that the function returns, if it fits."""
        values = self._function(name, like)
        if not isinstance(values, torch.Tensor) or values.layout != torch.strided or values.is_meta:
            is_tensor = isinstance(values, torch.Tensor)
            kind = f"{values.layout} on {values.device}" if is_tensor else type(values).__name__
            raise ConfigError(
                f"weights({name!r}, ...) must return a dense tensor with values, not {kind}, from which no values can "
                "be read"
            )
        if values.shape != like.shape or values.dtype != like.dtype:
            raise ConfigError(
                f"weights({name!r}, ...) returned {_described(values)}, not {_described(like)}: return values of the "
                "parameter's shape and dtype, as values.to(parameter.dtype)"
            )
        return values.detach().cpu()


# The attribute of a parameter on meta that knows where its values are.
_SOURCE = "_memascend_source"
# peft's copy of a module that is trained beside adapters, and the module that it is copied from.
_COPIED = re.compile(r"\.modules_to_save\.[^.]+\.")


@dataclass(frozen=True)
class Source:
    """Where files have the values of a parameter on meta, and the dtype in which its model was loaded."""

    files: WeightFiles
    key: str
    dtype: torch.dtype

    def note(self, parameter: torch.Tensor) -> None:
        """Let a parameter on meta know this."""
        setattr(parameter, _SOURCE, self)

    def values(self) -> torch.Tensor:
        """The elements in this dtype."""
        return self.files.at(self.key, self.dtype).to(self.dtype)


def sources_of(model: torch.nn.Module) -> Callable[[str, torch.Tensor], torch.Tensor] | None:
    """A function for `offload(weights=)` where parameters on meta know their source; None where none does.

    Raises:
        ConfigError: another parameter on meta does not.
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
                f"{name} has no values: it was made of weights that {path} has, and that were not read yet (resized "
                "embeddings, adapters that begin with the weights): save the model with it first, or make the model "
                "outside of loading()"
            )
        found[name] = source

    def values(name: str, like: torch.Tensor) -> torch.Tensor:
        source = found[name]
        return source.values().to(like.dtype)

    return values


def first_rows(parameter: torch.Tensor, count: int) -> torch.Tensor | None:
    """The first rows of a parameter, from its files where it is on meta; None where they are not known."""
    if not parameter.is_meta:
        return parameter.detach()[:count]
    source: Source | None = vars(parameter).get(_SOURCE)
    return None if source is None else source.values()[:count].to(parameter.dtype)


def forget_sources(parameters: Iterable[torch.Tensor]) -> None:
    """Let parameters that are on storage keep no file open."""
    for parameter in parameters:
        vars(parameter).pop(_SOURCE, None)


class WeightFiles:
    """One safetensors file, or a folder of them; tensors stand on the mapped files, and nothing is copied.

    What is quantised there is dequantised when it is asked for.
    """

    def __init__(
        self, path: Path, names: Sequence[str] | None = None, *, method: Mapping[str, Any] | None = None
    ) -> None:
        """Open `path`, or with `names` these files in the folder `path`, with all of their tensors.

        `method` says how they are quantised; None: as a config.json beside them says.

        Raises:
            ConfigError: there are no safetensors, or not all of them; or they are quantised in a way that is not read.
            CorruptionError: a file is damaged or cut short.
        """
        self.path = path
        # By the name in the files, or the one that transformers gives it.
        self._where: dict[str, WeightTensor] = {}
        # The name in the files, by ours.
        self._of: dict[str, str] = {}
        for file, keys in _files(path) if names is None else [(path / name, None) for name in names]:
            opened = _opened(file)
            there = dict.fromkeys(opened.keys())
            lost = [key for key in keys or () if key not in there]
            if lost:
                raise ConfigError(f"{path} says that {lost[0]!r} is in {file.name}, and it is not: fetch both again")
            self._where.update({key: _FileTensor(opened, key) for key in (there if keys is None else keys)})
        folder = path if path.is_dir() else path.parent
        method = method or method_of(folder)
        if method is None:
            require_plain(self._where, folder)
        else:
            self._where = dequantized(self._where, method, folder)

    @property
    def keys(self) -> list[str]:
        """The names in the files."""
        return list(self._where)

    def check(self, names: Names, wanted: Mapping[str, torch.Tensor]) -> None:
        """Match the files' names with the model's, both ways."""
        found = self.matched(names)
        missing = [name for name in wanted if name not in found.of]
        problems = [_problem("missing in the files", missing), _problem("not in the model", found.unexpected)]
        unfit = []
        for name, like in wanted.items():
            for key in found.of.get(name, ()):
                dtype, shape = self._where[key].described(like.dtype)
                if shape != tuple(like.shape) or dtype != like.dtype:
                    named = "of a dtype that torch has no name for" if dtype is None else str(dtype)[len("torch.") :]
                    unfit.append(f"{key} is {named} of shape {list(shape)}, not {_described(like)}")
            if name in found.of:
                self._of[name] = found.of[name][0]
        problems.append(_problem("of another shape or dtype (a function as weights= may convert)", unfit))
        if not unfit:
            problems.append(_untying(found, self._untied(found, wanted)))
        problems = [problem for problem in problems if problem]
        if problems:
            raise ConfigError(
                f"{self.path} does not fit the model; {'; '.join(problems)}. Give the files of this model, or a "
                "function as weights="
            )
        # Buffers that are not saved as a rule, and are there all the same.
        self._of.update({name: keys[0] for name, keys in found.of.items() if name not in self._of})

    def matched(self, names: Names) -> Matched:
        """Match the names as they are; if some are left over, as transformers would rename and merge them."""
        found = names.matched(self._where)
        if not names.left(found):
            return found
        others = convert_names(names.model, self._where)
        if others is not None and names.left(converted_too := names.matched(others)) < names.left(found):
            self._where = others
            return converted_too
        return found

    def _untied(self, found: Matched, wanted: Collection[str]) -> list[tuple[str, str]]:
        """Pairs of names in the files that are one tensor in the model and have different values."""
        pairs = [(keys[0], key) for name, keys in found.of.items() if name in wanted for key in keys[1:]]
        return [(first, other) for first, other in pairs if not same_bits(self.at(first), self.at(other))]

    def has(self, name: str) -> bool:
        """Whether the files have it; after `check`."""
        return name in self._of

    def tensor(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The values, on the mapped file."""
        values = self.at(self._of[name], like.dtype)
        if values.shape != like.shape or values.dtype != like.dtype:
            raise ConfigError(
                f"{self._of[name]} is {_described(values)}, not {_described(like)}: give the files of this model, or "
                "a function as weights= that converts"
            )
        return values

    def at(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor by its name in the files; on the mapped file, unless it is made from several, or quantised."""
        return self._where[key].values(dtype)

    def on_meta(self, key: str) -> torch.Tensor:
        """A tensor by its name in the files, without its values."""
        return _on_meta(self._where[key])


@dataclass(frozen=True)
class _FileTensor:
    """A tensor as a file has it."""

    file: Any
    key: str

    def described(self, dtype: torch.dtype | None = None) -> tuple[torch.dtype | None, tuple[int, ...]]:
        del dtype
        part = self.file.get_slice(self.key)
        return DTYPES.get(part.get_dtype()), tuple(part.get_shape())

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Its elements, on the mapped file."""
        del dtype
        values: torch.Tensor = self.file.get_tensor(self.key)
        # Files of other programs may begin a tensor at any byte.
        return values.clone() if values.data_ptr() % values.element_size() else values


# Where the first values of parameters come from.
Weights = WeightFunction | WeightFiles


def _files(path: Path) -> list[tuple[Path, list[str] | None]]:
    """The files to open, and the names of the tensors to take from each (None: all)."""
    if path.is_file():
        return _indexed(path) if path.name.endswith(".index.json") else [(path, None)]
    if not path.is_dir():
        raise ConfigError(f"weights={str(path)!r} is {'neither a file nor a folder' if path.exists() else 'not there'}")
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
    what = f"{path} has {len(files)} safetensors files and no {_INDEX}" if files else f"{path} has no safetensors files"
    if any(path.glob("shard-*.safetensors")):
        what += (
            ", and parts that ranks wrote by torch.distributed.checkpoint are not joined: in one process, call "
            "torch.distributed.checkpoint.load(state, storage_reader=HuggingFaceStorageReader(folder), no_dist=True) "
            "with the state dict of a plain model, and write that by safetensors.torch.save_model()"
        )
    elif not files and any(path.glob("*.distcp")):
        what += (
            ", and torch.distributed.checkpoint's own are not read: convert them by torch.distributed.checkpoint."
            "format_utils.dcp_to_torch_save(folder, 'all.pt'), and write the weights in torch.load('all.pt') by "
            "safetensors.torch.save_file()"
        )
    elif not files and (any(path.glob("*.bin")) or any(path.glob("*.pt*"))):
        what += ", and pickled files are not read: convert them with safetensors"
    return ConfigError(what)


def _indexed(index: Path) -> list[tuple[Path, list[str] | None]]:
    with file_errors(index, "cannot be read"):
        _require_file(index)
    try:
        places = json.loads(read_bounded(index, "index of safetensors: fetch it again"))["weight_map"]
        well = isinstance(places, dict) and all(isinstance(file, str) for file in places.values())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptionError(
            f"{index} is not an index of safetensors ({error}): fetch it again", path=str(index)
        ) from error
    if not well or any(Path(file).name != file for file in places.values()):
        raise CorruptionError(
            f"{index} names something else than files beside it, and no others are read: fetch the model again",
            path=str(index),
        )
    keys: dict[Path, list[str]] = {}
    for key, file in places.items():
        keys.setdefault(index.parent / file, []).append(key)
    missing = [file.name for file in keys if not file.is_file()]
    if missing:
        raise ConfigError(_problem(f"{index.parent} misses files that its index names", missing))
    return [*keys.items()]


def _opened(file: Path) -> Any:
    try:
        with file_errors(file, "cannot be read"):
            _require_file(file)
            return safe_open(file, framework="pt").__enter__()  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise CorruptionError(
            f"{file} is no whole safetensors file ({error}): fetch it again",
            path=str(file),
            nbytes=file.stat().st_size,
        ) from error


def _require_file(path: Path) -> None:
    """Reject paths that could block for ever, such as a named pipe without a writer."""
    if not path.is_file():
        raise ConfigError(f"{path} is no regular file, and weights are read from files: take it out of the folder")


def _problem(what: str, names: list[str]) -> str:
    return f"{what}: {listed(names)}" if names else ""


def _untying(found: Matched, untied: list[tuple[str, str]]) -> str:
    """The problem of files that untie parameters which the model ties (Flan-T5's LM head, say), and what to do."""
    if not untied:
        return ""
    problem = _problem(
        "one parameter of the model, and different values in the files", [" and ".join(pair) for pair in untied]
    )
    remedies = []
    for first, other in untied:
        module, _, last = found.named[other].rpartition(".")
        if found.named[other] != found.named[first]:
            place = f'model.get_submodule("{module}").{last}'
            remedies.append(f"{place} = torch.nn.Parameter(torch.empty_like({place}))")
    how = "; give it a parameter of its own, as from_pretrained() does, and make the optimizer after that"
    return f"{problem}{how}: `{'; '.join(remedies)}`" if remedies else problem


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
