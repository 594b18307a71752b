"""Identifies the code that a measurement used, by a hash of its sources and by its commit."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

__all__ = ["code_hash", "commit"]

_ROOT = Path(__file__).parents[2]
# The sources that affect a measurement: memascend, this benchmark, the code that runs DeepSpeed, and the lock file of
# DeepSpeed's environment.
_SOURCES = (
    "python",
    "rust",
    "triton_kernels",
    "Cargo.toml",
    "Cargo.lock",
    "benchmarks/peers",
    "benchmarks/train",
    "benchmarks/reservation.py",
    "requirements/deepspeed.lock",
)
_SUFFIXES = {".py", ".rs", ".toml", ".lock", ".json"}
_SKIPPED = {"target", "__pycache__", "fuzz", "benches"}
# Files in the folders of `_SOURCES` that do not affect the measurement of a cell. They parse options, identify the
# code, and compare and print the results.
_APART = {f"benchmarks/train/{name}.py" for name in ("__main__", "code", "judge", "tables")}


def code_hash(root: Path = _ROOT) -> str:
    """Returns a hash of all sources that affect a measurement, in sixteen hexadecimal digits.

    The hash depends on the names and the contents of these files.
    """
    digest = hashlib.sha256()
    for source in _SOURCES:
        top = root / source
        files = sorted(path for path in top.rglob("*") if path.is_file()) if top.is_dir() else [top]
        for path in files:
            name = path.relative_to(root)
            if path.suffix in _SUFFIXES and _SKIPPED.isdisjoint(name.parts) and name.as_posix() not in _APART:
                digest.update(f"{name}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """Returns the commit that is checked out; "none" without git or outside of a repository.

    If tracked files differ from the commit, a "+" is appended.
    """
    if shutil.which("git") is None:
        return "none"
    words = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    printed = subprocess.run(words, check=False, capture_output=True, text=True)
    return printed.stdout.strip() or "none"
