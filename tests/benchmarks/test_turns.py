"""Tests that benchmarks whose cases take turns run to their end and print what they judge."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
JUDGED = {
    "accumulate": ("of in turn", "bytes, of one micro-batch"),
    "clipped": ("auto, never, of unclipped", "auto, always, of ssd, always"),
    "trainer": ("one line, of no position", "the position:", "10,000 lines of the log"),
    "muon": ("each moves", "s more than AdamW offloaded"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", JUDGED)
def test_a_benchmark_prints_what_it_judges(tmp_path, name):
    words = ["--parameters", "4M", "--rounds", "1", "--steps", "1", "--storage", tmp_path, "--write", tmp_path]
    if name == "accumulate":
        words += ["--parts", "seconds", "bytes", "--counts", "1", "8", "--lengths", "128"]
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *map(str, words)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert ended.returncode == 0, ended.stderr
    for line in JUDGED[name]:
        assert line in ended.stdout
    assert (tmp_path / f"{name}.json").exists()
    assert ended.stdout.strip() in (tmp_path / f"{name}.txt").read_text()
