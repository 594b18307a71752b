"""Tests that README's examples run as they stand, and that its commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(example, loaded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded(example)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_command_exists(document):
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)", (ROOT / document).read_text()))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= targets, named - targets


def test_links_lead_somewhere():
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#][^)]*)\)", (ROOT / name).read_text()):
            assert link.startswith("http") or (ROOT / link).exists(), f"{name} links to {link}"
