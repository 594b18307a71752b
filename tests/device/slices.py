"""Runs the GPU tests with a built wheel, in slices of limited time. Needs no cargo, no network and no set-up.

    python3 tests/device/slices.py --wheel dist/memascend-*.whl      # repeat until it prints "all done"

The folder --state keeps the outcomes of tests, and the next slice runs the remaining tests. A test that does not end,
or that ends the process, is recorded as failed. Exit status: 0 if all tests are done and no test failed, 1 if all tests
are done and some failed, or if no test can run, 3 if tests remain, so that you must run the command again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A test that the time limit of a slice has interrupted runs once more, as the first test of the next slice.
ATTEMPTS_MAX = 2
ENDS_WITHIN = 15


def read(path):
    """Returns the outcomes of finished tests, and how often each unfinished test was started."""
    done, begun = {}, Counter()
    for line in lines(path):
        if "begin" in line:
            begun[line["begin"]] += 1
        elif "end" in line:
            done[line["end"]] = line
    for name in done:
        begun.pop(name, None)
    return done, begun


def lines(path):
    found = []
    with contextlib.suppress(FileNotFoundError):
        for text in path.read_text().splitlines():
            # The last line may be incomplete.
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(text))
    return found


def unpacked(wheels, folder):
    """Unpacks the wheels into `folder`, unless `folder` has the same wheels already; returns `folder`."""
    names = [f"{wheel.name} {wheel.stat().st_size} {wheel.stat().st_mtime_ns}" for wheel in wheels]
    stamp = folder / "wheels.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != names:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(folder)
        stamp.write_text(json.dumps(names))
    return folder


def environment(site, answer):
    # Makes Python import memascend from the unpacked wheel, not from the checkout or from installed packages.
    own = {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "tests"), str(ROOT)]),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "MEMASCEND_OUTCOMES": str(answer),
        "MEMASCEND_GPU": "1",
    }
    return {**os.environ, **own}


def with_devices():
    """Returns the files with GPU tests. Other files are left out: they may import packages that are not installed."""
    found = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()}
    return sorted({*found, *(ROOT / "tests/device").glob("test_*.py")})


def ended(command, env, log, limit):
    """Runs a command in a new session; returns its exit status, or None if it was killed after `limit` seconds."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(max(1, limit))
        except subprocess.TimeoutExpired:
            for sent in (signal.SIGINT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sent)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDS_WITHIN)
            return None
        finally:
            # Kills processes that the command left running.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def tested(options, answer, env, until):
    """Runs tests until all have an outcome or the time is up; returns True if all tests have an outcome."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "device.outcomes", "-p", "no:cacheprovider", "-p", "no:xdist",
        "--timeout", str(options.timeout), "-m", "gpu", *map(str, with_devices()),
    ]  # fmt: skip
    while (left := until - time.monotonic() - ENDS_WITHIN) > 0:
        before = len(lines(answer))
        began = time.monotonic()
        status = ended(command, env, options.state / "tests.log", left)
        new = lines(answer)[before:]
        if any("finished" in line for line in new):
            return True
        if status is not None and not any("begin" in line for line in new):
            raise SystemExit(f"pytest ended with status {status} and ran no test: read {options.state / 'tests.log'}")
        _, begun = read(answer)
        for name, count in begun.items():
            # The test `name` was running when this pytest process, or an earlier pytest process, ended.
            if status is None and count < ATTEMPTS_MAX:
                continue
            how = f"ended the process with {status}"
            if status is None:
                how = f"did not end, {count} times; the last time in a process of {time.monotonic() - began:.0f} s"
            with answer.open("a") as file:
                file.write(json.dumps({"end": name, "outcome": "failed", "seconds": 0, "output": how}) + "\n")
    return False


def summary(options, answer, *, complete):
    """Writes the outcomes so far to summary.txt; returns the text, and whether a test has failed."""
    done, _ = read(answer)
    names = next((line["all"] for line in reversed(lines(answer)) if "all" in line), [])
    counts = Counter(line["outcome"] for line in done.values())
    failed = {name: line for name, line in done.items() if line["outcome"] == "failed"}
    skipped = Counter(line["output"] for line in done.values() if line["outcome"] == "skipped")
    slowest = sorted(done.values(), key=lambda line: -line["seconds"])[:5]
    text = [
        f"{len(done)} of {len(names)} tests: " + ", ".join(f"{count} {of}" for of, count in sorted(counts.items())),
        *(f"skipped {count}: {reason}" for reason, count in skipped.most_common()),
        *(f"slowest: {line['seconds']:.1f} s {line['end']}" for line in slowest),
        *(f"\nFAILED {name}\n{line['output']}" for name, line in failed.items()),
        "\nall done" if complete else "\nnot done yet: run it again",
    ]
    (options.state / "summary.txt").write_text("\n".join(text) + "\n")
    return "\n".join(text), bool(failed)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="memascend's wheel (default: the newest in dist/)")
    parser.add_argument("--packages", type=Path, help="a folder with wheels of pytest and other missing packages")
    parser.add_argument("--state", type=Path, default=ROOT / "target/gpu", help="for outcomes and logs (target/gpu)")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="copies --state there (default: $OUT)")
    parser.add_argument("--seconds", type=float, default=480, help="time limit of a slice in seconds (480)")
    parser.add_argument("--timeout", type=float, default=300, help="time limit of a test in seconds (300)")
    parser.add_argument("--again", action="store_true", help="delete all outcomes and start again")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.seconds
    options.state = options.state.absolute()
    if options.again:
        shutil.rmtree(options.state, ignore_errors=True)
    options.state.mkdir(parents=True, exist_ok=True)
    wheels = (
        [options.wheel] if options.wheel else sorted(ROOT.glob("dist/*.whl"), key=lambda path: path.stat().st_mtime)
    )
    if not wheels or not wheels[-1].is_file():
        raise SystemExit("no wheel was found: run `make wheel` and copy dist/ to this machine, or pass --wheel")
    others = sorted(options.packages.glob("*.whl")) if options.packages else []
    site = unpacked([wheels[-1], *others], options.state / "site")
    answer = options.state / "outcomes.jsonl"
    log = options.state / "torch.log"
    env = environment(site, answer)
    sees = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if ended([sys.executable, "-c", sees], env, log, options.seconds):
        raise SystemExit(f"torch finds no CUDA device, so all tests would be skipped: read {log} and check the driver")
    complete = tested(options, answer, env, until)
    text, failed = summary(options, answer, complete=complete)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        for path in filter(Path.is_file, options.state.iterdir()):
            shutil.copy(path, options.out)
    return (1 if failed else 0) if complete else 3


if __name__ == "__main__":
    sys.exit(main())
