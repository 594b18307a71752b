"""Finds what --data, --eval and --model name: files, patterns, folders, and names on the hub of Hugging Face."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
# What lies beside rows and is none.
_ABOUT = {"dataset_info.json", "dataset_infos.json", "state.json", "config.json"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?:/.+)?")
_SPLIT = re.compile(r"(?:^|[-_./])(train|training|validation|valid|val|dev|eval|test)(?=[-_./\d]|$)")
_TRAIN = ("train", "training")
_HELD_OUT = ("validation", "valid", "val", "dev", "eval", "test")
_MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "tokenizer*", "*.txt"]


def is_hub_name(text: str) -> bool:
    """Whether it is OWNER/NAME, perhaps with a path or pattern behind it, and nothing that lies here."""
    path = Path(text)
    if not _HUB_NAME.fullmatch(text) or path.exists() or path.parent.is_dir():
        return False
    return text.count("/") > 1 or path.suffix.lower() not in SUFFIXES


def find_model(text: str) -> Path:
    """The folder of a model; one of the hub is downloaded into its cache.

    Raises:
        ConfigError: it is neither here nor there.
    """
    folder = Path(text)
    if folder.is_dir():
        return folder
    if text.count("/") == 1 and is_hub_name(text):
        return _downloaded(text, "model", _MODEL_FILES)
    raise ConfigError(
        f"--model {text} is no folder: download the model first, with `hf download NAME --local-dir {text}`"
    )


def find_files(texts: Sequence[str], *, held_out: bool = False) -> tuple[list[Path], str]:
    """The files of rows, in the order in which they are read; and what of them was left out, in words.

    Args:
        texts: each a file, a pattern, a folder, or a data set on the hub.
        held_out: whether a folder with several splits means those that are held out, and not the one for training.

    Raises:
        ConfigError: one of them is nothing, or leaves open what is meant.
    """
    files: list[Path] = []
    said = []
    for text in texts:
        found, note = _found(text, _HELD_OUT if held_out else _TRAIN)
        files += found
        if note:
            said.append(note)
    return files, "; ".join(said)


def _found(text: str, splits: tuple[str, ...]) -> tuple[list[Path], str]:
    path = Path(text)
    if path.is_file():
        return [path], ""
    if path.is_dir():
        return _in_folder(path, splits)
    if is_hub_name(text):
        owner, name, *rest = text.split("/", 2)
        folder = _downloaded(f"{owner}/{name}", "dataset", rest or [f"*{suffix}" for suffix in SUFFIXES])
        return _matching(str(folder / rest[0])) if rest else _in_folder(folder, splits)
    if glob.has_magic(text):
        return _matching(text)
    raise ConfigError(f"{path} is not there, or is no file")


def _matching(pattern: str) -> tuple[list[Path], str]:
    files = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())  # noqa: PTH207
    if not files:
        raise ConfigError(f"no file matches {pattern}")
    return files, ""


def _in_folder(folder: Path, splits: tuple[str, ...]) -> tuple[list[Path], str]:
    """All rows of a folder, of one split where it has several."""
    there = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and path.name not in _ABOUT
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    # A text beside rows says something about them.
    rows = [path for path in there if path.suffix.lower() != ".txt"] or there
    if not rows:
        saved = " (what save_to_disk() wrote is none: dataset.to_parquet() is)" if list(folder.glob("*.arrow")) else ""
        raise ConfigError(f"{folder} has no file that ends in {', '.join(SUFFIXES)}{saved}")
    kinds = sorted({path.suffix.lower() for path in rows})
    if len(kinds) > 1:
        raise ConfigError(
            f"{folder} has files of several kinds, {', '.join(kinds)}: say which, as '{folder}/*{kinds[0]}'"
        )
    by_split: dict[str, list[Path]] = {}
    for path in rows:
        named = _SPLIT.search(str(path.relative_to(folder)).lower())
        by_split.setdefault(named[1] if named else "", []).append(path)
    if len(by_split) == 1:
        return rows, ""
    chosen = next((split for split in splits if split in by_split), None)
    if chosen is None:
        names = ", ".join(sorted(split or "of no split" for split in by_split))
        raise ConfigError(f"{folder} has files of several splits ({names}): say which, as '{folder}/NAME*{kinds[0]}'")
    others = len(rows) - len(by_split[chosen])
    return by_split[chosen], f"of {folder} the {chosen} split, without {others} of its {len(rows)} files"


def _downloaded(name: str, kind: str, patterns: list[str]) -> Path:
    """What the hub has under a name, in huggingface_hub's own cache."""
    line = f"`hf download {'--repo-type dataset ' if kind == 'dataset' else ''}{name} --local-dir FOLDER`"
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(f"{name} is nothing here; of the hub, download it: {line}, and name FOLDER") from error
    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type=kind, allow_patterns=patterns))
    except Exception as error:
        raise ConfigError(
            f"{name} is nothing here, and as a {kind} of the hub it cannot be had ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}); where there is a "
            f"network: {line}, and name FOLDER"
        ) from error
