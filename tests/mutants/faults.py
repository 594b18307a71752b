"""Reads faults from `python/*.toml` and `rust/*.toml`, and applies them. Tests must detect each fault."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# A fault names its nearest tests, not all tests that detect it.
MOST_TESTS = 3


@dataclass(frozen=True)
class Fault:
    """A change of one file, and tests. At least one of these tests must fail after the change."""

    language: str
    package: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self):
        return f"{self.language}/{self.package}: {self.name}"

    def applied(self, text):
        """Returns the file's text with the fault.

        Raises ValueError unless `text` contains the old text exactly once.
        """
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"{self}: {self.file} must contain the fault's old text once, not {times} times")
        return text.replace(self.old, self.new)

    def key(self, root):
        """Returns a hash of the fault, its file and its tests.

        The gate stores the result of the fault under this hash.
        """
        whole = hashlib.sha256(repr(self).encode())
        for path in sorted({root / self.file, *self.sources(root)}):
            whole.update(path.read_bytes())
        return whole.hexdigest()

    def sources(self, root):
        """Returns the files with the fault's tests."""
        if self.language == "python":
            return {root / test.partition("::")[0] for test in self.tests}
        # The files of a crate's code also have tests, so `sources` returns all files of the crate.
        return set((root / "rust" / self.package).glob("*/**/*.rs"))


def faults():
    """Returns all faults, package by package."""
    found = []
    for path in sorted(HERE.glob("*/*.toml")):
        for entry in tomllib.loads(path.read_text())["fault"]:
            tests = tuple(entry.pop("tests"))
            found.append(Fault(path.parent.name, path.stem, tests=tests, **entry))
    return found


def problems(found, root):
    """Yields a message for each mistake in the definition of a fault. With mistakes, the gate runs no faults."""
    names = set()
    for fault in found:
        if str(fault) in names:
            yield f"{fault}: another fault has this name: choose a different one"
        names.add(str(fault))
        if not 0 < len(fault.tests) <= MOST_TESTS:
            yield f"{fault}: names {len(fault.tests)} tests: name one to {MOST_TESTS}"
        try:
            fault.applied((root / fault.file).read_text())
        except (OSError, ValueError) as error:
            yield str(error)
        for source in fault.sources(root):
            if not source.is_file():
                yield f"{fault}: its test file {source.relative_to(root)} does not exist"
