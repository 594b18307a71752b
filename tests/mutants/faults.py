"""The faults that the tests must notice: what stands in `python/*.toml` and `rust/*.toml`, read and applied."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# A fault names its nearest tests, not all that could notice it.
MOST_TESTS = 3


@dataclass(frozen=True)
class Fault:
    """One change of one file, and the tests that have to fail with it."""

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
        """The text of the file with the fault; ValueError where it does not apply."""
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"{self}: {self.file} has its old text {times} times, which must be once")
        return text.replace(self.old, self.new)

    def key(self, root):
        """A hash of the fault, of its file and of its tests: what the result depends on most."""
        whole = hashlib.sha256(repr(self).encode())
        for path in sorted({root / self.file, *self.sources(root)}):
            whole.update(path.read_bytes())
        return whole.hexdigest()

    def sources(self, root):
        """The files that have its tests."""
        if self.language == "python":
            return {root / test.partition("::")[0] for test in self.tests}
        # Tests of a crate stand beside its code, too.
        return set((root / "rust" / self.package).glob("*/**/*.rs"))


def faults():
    """All of them, package by package."""
    found = []
    for path in sorted(HERE.glob("*/*.toml")):
        for entry in tomllib.loads(path.read_text())["fault"]:
            tests = tuple(entry.pop("tests"))
            found.append(Fault(path.parent.name, path.stem, tests=tests, **entry))
    return found


def problems(found, root):
    """Why faults cannot be run, one sentence for each; none where all can."""
    names = set()
    for fault in found:
        if str(fault) in names:
            yield f"{fault}: a second one of this name"
        names.add(str(fault))
        if not 0 < len(fault.tests) <= MOST_TESTS:
            yield f"{fault}: names {len(fault.tests)} tests, which are to be one to {MOST_TESTS}"
        try:
            fault.applied((root / fault.file).read_text())
        except (OSError, ValueError) as error:
            yield str(error)
        for source in fault.sources(root):
            if not source.is_file():
                yield f"{fault}: {source.relative_to(root)} is not there"
