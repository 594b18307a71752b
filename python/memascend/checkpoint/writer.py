"""Writes checkpoints. Streams a checkpoint from the store into a new folder, flushes the folder, and renames it."""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.checkpoint.files import (
    Names,
    divide_into_files,
    file_errors,
    is_empty,
    make_file,
    new_folder,
    replace_folder,
    saved_name,
    sync,
)
from memascend.checkpoint.reader import FOLDER, FORMAT, MANIFEST, VERSION, render_manifest, state_key
from memascend.checkpoint.shares import checksums_of
from memascend.checkpoint.weights import misread_names
from memascend.errors import ConfigError, StorageError
from memascend.text import expanded, refusal_of, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from memascend.checkpoint.contents import Content
    from memascend.checkpoint.shares import Places, Sums

    # fill(folder, places): writes the tensors into files that already have their headers. Returns the written parts.
    Fill = Callable[[Path, Places], Sums]


# Matches the names that transformers gives to weight files: a single file, one of several files, and an index.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


def save(
    folder: str | os.PathLike[str],
    records: Sequence[Content],
    model: torch.nn.Module,
    facts: Mapping[str, Any],
    fill: Fill,
    *,
    among_others: bool = False,
) -> None:
    """Writes a checkpoint to a folder whose parent folder exists.

    Replaces an earlier checkpoint in the folder only when the new checkpoint is complete.

    Args:
        folder: the folder of the checkpoint. Other files in this folder, such as a tokenizer, are kept.
        records: the tensors of the checkpoint, on meta.
        model: the order of its parameters decides which file has which tensor. `save()` also writes the configuration
            of the model.
        facts: the fields of the manifest that do not describe the files or the format.
        fill: writes the tensors of `records` into files that already have their headers.
        among_others: also accepts a folder that has other files but no checkpoint. Replaces weight files in this
            folder.

    Raises:
        ConfigError: the folder is not a valid path, has no parent folder, or contains files that are not a checkpoint;
            or safetensors does not support the dtype of a tensor.
        StorageError: the disk is full or fails.
        UsageError: another process is saving to the folder.
    """
    why = refusal_of(folder)
    if why is not None:
        raise ConfigError(
            f"the checkpoint's folder is not a valid path ({why}): {os.fspath(folder)!r:.100}. Pass another folder"
        )
    target = Path(os.path.abspath(expanded(folder)))  # noqa: PTH100
    files = _CheckpointFiles(records, model)
    _require_place(target, files.nbytes, among_others=among_others)
    with new_folder(target) as new:
        (new / FOLDER).mkdir()
        described = files.write(new, fill)
        configured = _configure(model, new)
        manifest = {
            **facts,
            "format": FORMAT,
            "version": VERSION,
            **({"orders": files.orders} if files.orders else {}),
            "files": described,
            "beside": [*configured, *files.index(new)],
        }
        _write(new / FOLDER / MANIFEST, render_manifest(manifest))
        for name in manifest["beside"]:
            sync(new / name)
        with file_errors(target, "cannot be written"):
            _keep_others(target, new)
        replace_folder(target, new)


def save_weights(folder: Path, records: Sequence[Content], model: torch.nn.Module, fill: Fill) -> None:
    """Writes values and configuration for `from_pretrained` into an existing folder that has no weights yet.

    `records` have no optimizer state. `save()` describes `model` and `fill`.
    """
    files = _CheckpointFiles(records, model)
    files.write(folder, fill)
    _configure(model, folder)
    files.index(folder)


class _CheckpointFiles:
    """The files of one checkpoint. The tensors are divided into files in the order of the model's parameters."""

    def __init__(self, records: Sequence[Content], model: torch.nn.Module) -> None:
        order = {name: position for position, (name, _) in enumerate(model.named_parameters())}
        # Sort by the model's order, so that the files do not depend on the division of the model into units.
        records = sorted(records, key=lambda record: order.get(record.name, len(order)))
        values = {saved_name(record.name): record.values for record in records}
        state = {state_key(record.name, of): tensor for record in records for of, tensor in record.state.items()}
        # The metadata maps each tied name to the tensor's first name, as save_model() of safetensors does.
        self._weights = divide_into_files("model", values, {"format": "pt", **Names(model).tied})
        self._all = [*self._weights, *(divide_into_files(f"{FOLDER}/state", state, {}) if state else [])]
        self.orders = {saved_name(record.name): record.order for record in records if record.order is not None}
        self.nbytes = sum(layout.nbytes for layout in self._all)

    def write(self, folder: Path, fill: Fill) -> dict[str, Any]:
        """Writes all files. Returns the files' entries in the manifest."""
        entries, places = {}, {}
        for layout in self._all:
            entries[layout.name], places[layout.name] = make_file(folder, layout)
        sums = fill(folder, places)
        for layout in self._all:
            tensors = layout.tensors.items()
            entries[layout.name]["tensors"] = {
                name: checksums_of(tensor.nbytes, sums.get((layout.name, name), ())) for name, tensor in tensors
            }
        return entries

    def index(self, folder: Path) -> list[str]:
        """Writes the index if the weights have several files. Returns the names of the files that this method wrote."""
        if len(self._weights) == 1:
            return []
        places = {name: layout.name for layout in self._weights for name in layout.tensors}
        total = sum(layout.nbytes for layout in self._weights)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True)
        _write(folder / "model.safetensors.index.json", text.encode())
        return ["model.safetensors.index.json"]


def _configure(model: torch.nn.Module, folder: Path) -> list[str]:
    """Writes the configuration files that `from_pretrained` reads. Returns the names of these files."""
    before = set(os.listdir(folder))  # noqa: PTH208
    config: Any = getattr(model, "config", None)
    # Skip a wrapper (peft), because its `config` belongs to the model inside, which has a different class.
    if callable(getattr(config, "save_pretrained", None)) and not hasattr(model, "get_base_model"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), None)
        config.dtype = None if dtype is None else str(dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        lost = misread_names(model)
        if lost:
            warn(
                "from_pretrained() of this version of transformers cannot read this checkpoint, because it mistakes "
                f"{lost[0]} for another parameter. To read the checkpoint, use weights= or checkpoint= of memascend. "
                "For from_pretrained(), save the model with model.save_pretrained()"
            )
        generation: Any = getattr(model, "generation_config", None)
        if callable(getattr(generation, "save_pretrained", None)):
            generation.save_pretrained(folder)
    return sorted(set(os.listdir(folder)) - before)  # noqa: PTH208


def _require_place(target: Path, nbytes: int, *, among_others: bool) -> None:
    """Rejects a target that is a file or has no parent folder, and a disk without enough space.

    Without `among_others`, also rejects a folder that has files but no checkpoint.
    """
    parent = target.parent
    if not parent.is_dir():
        raise ConfigError(f"the folder {parent} does not exist. Create it before save({target.name!r})")
    ours = is_empty(target) or (target / FOLDER / MANIFEST).is_file() or (among_others and target.is_dir())
    if target.exists() and not ours:
        raise ConfigError(
            f"{target} is a file or contains files that are not a checkpoint, so nothing was written. Pass another "
            "folder"
        )
    free = shutil.disk_usage(parent).free
    if nbytes > free:
        raise StorageError(
            f"the checkpoint needs {nbytes} bytes, but only {free} bytes are available in {parent}. Delete files "
            "there, or pass another folder",
            errno=errno.ENOSPC,
            path=str(parent),
        )


def _keep_others(target: Path, new: Path) -> None:
    """Links the target's other files, such as a tokenizer, into the new folder.

    Leaves out files that the new folder has, and files that the target's manifest names. If the target has no manifest,
    leaves out weight files instead.
    """
    if not target.is_dir():
        return
    manifest = target / FOLDER / MANIFEST
    named = json.loads(manifest.read_bytes()) if manifest.is_file() else {}
    ours = {str(name) for name in (*named.get("files", ()), *named.get("beside", ()))}
    for path in target.iterdir():
        replaced = path.name in ours or (not named and _WEIGHTS.fullmatch(path.name))
        if replaced or path.name == FOLDER or (new / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=_linked)
        else:
            _linked(str(path), str(new / path.name))


def _linked(source: str, to: str) -> None:
    """Makes a hard link to a file. Copies the file if this fails, as on file systems without hard links."""
    try:
        os.link(source, to, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, to, follow_symlinks=False)


def _write(path: Path, content: bytes) -> None:
    with file_errors(path, "cannot be written"):
        path.write_bytes(content)
        sync(path)
