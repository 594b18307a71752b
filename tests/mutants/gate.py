"""Applies each fault to a copy of the tree and runs the fault's nearest tests (`make mutants`).

If these tests pass, the fault survives. The gate applies faults in Python and faults in Rust at the same time, to
separate copies of the tree in `target/mutants`. This folder also has the results of faults. The key of a result is a
hash of the fault, its file and its tests. Before the gate applies the faults of a package, it runs their tests without
a fault. A later failure is then due to a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mutants.faults import ROOT, faults, problems

PLACE = ROOT / "target" / "mutants"
SECONDS = 60
# The time limit in seconds for all tests of a package, or for the build of a crate and its dependencies.
SECONDS_WITHOUT = 1800
# pytest's exit status if a test failed. If the status is neither 0 nor this number, pytest could not run the tests.
FAILED = 1


class Tree:
    """A copy of the working tree, to which the faults of one language are applied one after the other."""

    def __init__(self, language):
        self.root = PLACE / language
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        here = {name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)}
        here |= {str(path.relative_to(ROOT)) for path in (ROOT / "python" / "memascend").glob("_core*.so")}
        for path in [path for path in self.root.rglob("*.*") if path.is_file() and not path.is_symlink()]:
            if str(path.relative_to(self.root)) not in here and "__pycache__" not in path.parts:
                path.unlink()
        for name in here:
            self._copy(name)

    def _copy(self, name):
        """Copies a file unless the tree has an equal copy.

        A new copy of a Rust file would be newer than the build, so cargo would compile the file's crate again.
        """
        source, target = ROOT / name, self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.unlink(missing_ok=True)
            target.symlink_to(source.readlink())
        elif not target.is_file() or target.read_bytes() != source.read_bytes():
            shutil.copy(source, target)

    @contextlib.contextmanager
    def having(self, fault):
        path = self.root / fault.file
        before = path.read_text()
        self._write(path, fault.applied(before))
        try:
            yield
        finally:
            self._write(path, before)

    def _write(self, path, text):
        path.write_text(text)
        # Python uses a .pyc if the source has the length and the time, in whole seconds, that the .pyc records. A fault
        # may leave both the length and the time unchanged. So delete the .pyc.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


class Late(Exception):
    """Raised if a command does not end within its time limit."""


def run(command, cwd, seconds, **environment):
    """Runs a command in a new process group; returns its exit status and the end of its output.

    Raises Late if the command does not end within `seconds`.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        raise Late from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, output[-6000:]


class Pytest:
    """Runs Python tests in a tree."""

    def __init__(self, tree):
        self._root = tree.root

    def build(self, package, tests):
        """Does nothing: the tree has a copy of the extension."""

    def failure(self, package, tests, seconds):  # noqa: ARG002 - Cargo needs the package
        """Returns the output of the first test that fails, or None if all tests pass.

        Raises RuntimeError if pytest cannot run a test, and Late if the tests do not end within `seconds`.
        """
        options = ["-q", "-x", "-p", "no:cacheprovider", f"--timeout={SECONDS_WITHOUT}"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        # Triton reads TRITON_INTERPRET when it is imported.
        interpreted = str(int(any("/interpreted/" in test for test in tests)))
        environment = {"PYTHONPATH": str(self._root / "python"), "TRITON_INTERPRET": interpreted}
        status, output = run(command, self._root, seconds, **environment)
        if status not in {0, FAILED}:
            raise RuntimeError(f"pytest could not run the tests (exit status {status}):\n{output}")
        return output if status else None


class Cargo:
    """Runs a crate's tests in a tree.

    A test is named by the arguments of `cargo test` that follow the crate's name.
    """

    def __init__(self, tree):
        self._root = tree.root

    def _test(self, package, words, seconds):
        command = ["cargo", "test", "--quiet", "--locked", "-p", f"memascend-{package}", *words]
        return run(command, self._root, seconds, CARGO_TARGET_DIR=str(PLACE / "build"))

    def build(self, package, tests):
        """Builds the programs that contain the tests; raises RuntimeError if the code does not compile."""
        programs = {word for test in tests for word in re.findall(r"^--lib|^--test \S+", test)}
        status, output = self._test(package, [*shlex.split(" ".join(programs)), "--no-run"], SECONDS_WITHOUT)
        if status:
            raise RuntimeError(f"cargo could not build the tests (exit status {status}):\n{output}")

    def failure(self, package, tests, seconds):
        """Returns the output of the first test that fails, or None if all tests pass.

        Raises RuntimeError if a test does not exist, and Late if the tests do not end within `seconds`.
        """
        until = time.monotonic() + seconds
        for test in tests:
            status, output = self._test(package, shlex.split(test), until - time.monotonic())
            if status:
                return output
            if not any(map(int, re.findall(r"(\d+) passed", output))):
                raise RuntimeError(f"no test is called {test}:\n{output}")
        return None


class Gate:
    """Runs faults and stores their results."""

    def __init__(self, seconds):
        self._seconds = seconds
        self._file = PLACE / "results.json"
        self._lock = threading.Lock()
        self.results = json.loads(self._file.read_text()) if self._file.is_file() else {}
        self.worst = []

    def run(self, language, asked):
        """Reports the requested faults of one language, package by package; runs those without a stored result."""
        tree = Tree(language)
        runner = {"python": Pytest, "rust": Cargo}[language](tree)
        for package in dict.fromkeys(fault.package for fault in asked):
            self._run_package(tree, runner, [fault for fault in asked if fault.package == package])

    def _run_package(self, tree, runner, asked):
        keys = {fault: fault.key(ROOT) for fault in asked}
        for fault in asked:
            if keys[fault] in self.results:
                self._report(fault, self.results[keys[fault]])
        new = [fault for fault in asked if keys[fault] not in self.results]
        if not new:
            return
        tests = list(dict.fromkeys(test for fault in new for test in fault.tests))
        package = new[0].package
        try:
            runner.build(package, tests)
            output = runner.failure(package, tests, SECONDS_WITHOUT)
        except (Late, RuntimeError) as error:
            output = str(error) or f"the tests took longer than {SECONDS_WITHOUT} s"
        if output is not None:
            for fault in new:
                self._report(fault, f"not run: the tests of {package} fail without a fault")
            print(output, flush=True)
            return
        for fault in new:
            begun = time.monotonic()
            result, output = self._outcome(tree, runner, fault)
            self._report(fault, result, f"{time.monotonic() - begun:.0f} s")
            if result == "not run":
                print(output, flush=True)
            else:
                self._keep(keys[fault], result)

    def _outcome(self, tree, runner, fault):
        """Runs a fault; returns "caught", "survives" or "not run".

        Also returns the tests' output or a reason; None for "survives".
        """
        try:
            try:
                with tree.having(fault):
                    runner.build(fault.package, fault.tests)
                    output = runner.failure(fault.package, fault.tests, self._seconds)
            except Late:
                # The tests took too long. If they end in time without the fault, the fault caused the delay.
                runner.build(fault.package, fault.tests)
                runner.failure(fault.package, fault.tests, self._seconds)
                return "caught", f"the tests did not end within {self._seconds} s"
        except Late:
            return "not run", f"the tests take more than {self._seconds} s even without the fault: raise --seconds"
        except RuntimeError as error:
            return "not run", str(error)
        return ("survives" if output is None else "caught"), output

    def _keep(self, key, result):
        with self._lock:
            self.results[key] = result
            self._file.write_text(json.dumps(self.results, indent=1, sort_keys=True))

    def _report(self, fault, result, took="kept"):
        if result != "caught":
            self.worst.append((fault, result))
        print(f"{result if result == 'caught' else result.upper()}  {fault}  ({took})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="run faults whose language, package or name has one of these words")
    parser.add_argument("--list", action="store_true", help="only list the faults")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit for one fault's tests (%(default)s)")
    options = parser.parse_args()
    asked = [fault for fault in faults() if not options.words or any(word in str(fault) for word in options.words)]
    wrong = list(problems(faults(), ROOT))
    if wrong or not asked:
        return "\n".join(wrong) or "no fault has one of these words: see --list"
    if options.list:
        print(*asked, sep="\n")
        return 0
    gate = Gate(options.seconds)
    with ThreadPoolExecutor() as lanes:
        languages = dict.fromkeys(fault.language for fault in asked)
        list(lanes.map(lambda language: gate.run(language, [f for f in asked if f.language == language]), languages))
    print(f"{len(asked) - len(gate.worst)} of {len(asked)} faults are caught")
    for fault, result in gate.worst:
        print(f"{result}: {fault}: {', '.join(fault.tests)}")
    return 1 if gate.worst else 0


if __name__ == "__main__":
    sys.exit(main())
