"""Tests `memascend doctor --gpu`: the file that it writes, what it finds, and that it refuses without a device."""

import json

import pytest
import torch

from memascend import kernels
from memascend.cli import gpu_check, main

CHECKS = ["pinning", "copies", "kernels", "training"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """What a card does in a moment takes a processor a while."""
    monkeypatch.setattr(gpu_check, "_SIZES", (1, 100, 2049))
    monkeypatch.setattr(gpu_check, "_PINNED_BYTES", 4 << 20)


def findings(report):
    return {finding["subject"]: finding for check in report["checks"] for finding in check["findings"]}


@pytest.mark.parametrize("words", [[], ["--output", "mine.json"], ["--json"]])
def test_without_a_device_one_line_says_so(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--gpu", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert "nothing written" in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_the_check_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--output", str(tmp_path / "file")])
    assert "--gpu" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named_before_anything_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "_missing", lambda: None)
    monkeypatch.setattr(gpu_check, "checked", lambda *_: pytest.fail("it ran"))
    assert main(["doctor", "--gpu", "--output", str(tmp_path / "no" / "file")]) == 2
    assert str(tmp_path / "no") in capsys.readouterr().err


def test_the_checks_compare(tmp_path):
    """On the CPU, where all of it is equal; the trained model is the one of memory."""
    report = gpu_check.checked(torch.device("cpu"), tmp_path)
    found = findings(report)
    assert [check["check"] for check in report["checks"]] == CHECKS
    assert report["ok"], gpu_check.shown(report)
    for subject in ("overflow check and norm", "training of 4 steps"):
        assert found[subject]["verdict"] == "fine"
        assert found[subject]["figures"]["different"] == {}
    json.dumps(report)


@pytest.mark.parametrize(
    ("where", "subject"),
    [("found_in", "overflow check and norm"), ("training", "training of 4 steps")],
)
def test_one_bit_is_seen(tmp_path, monkeypatch, where, subject):
    if where == "found_in":
        inner = kernels.found_in
        monkeypatch.setattr(
            gpu_check.kernels, "found_in", lambda sums: [(bad, squares and squares + 1) for bad, squares in inner(sums)]
        )
        found = [finding for finding, _ in gpu_check._kernels(torch.device("cpu"))]
    else:
        inner = gpu_check._in_memory

        def other(*arguments):
            said, values = inner(*arguments)
            values[0].view(torch.int32 if values[0].dtype == torch.float32 else torch.int16)[0] ^= 1
            return said, values

        monkeypatch.setattr(gpu_check, "_in_memory", other)
        found = [finding for finding, _ in gpu_check._training(torch.device("cpu"), tmp_path)]
    wrong = {finding.subject: finding.verdict for finding in found if finding.verdict == "fails"}
    assert wrong == {subject: "fails"}


def test_a_check_that_fails_is_in_the_file_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "_copied", lambda *_: 1 / 0)
    monkeypatch.setattr(gpu_check, "_training", lambda *_: iter(()))
    report = gpu_check.checked(torch.device("cpu"), tmp_path)
    failed = findings(report)["copies"]
    assert not report["ok"]
    assert failed["verdict"] == "fails"
    assert "ZeroDivisionError" in failed["found"]
    assert "test_gpu_check.py" in failed["trace"]
    assert "ZeroDivisionError" in gpu_check.shown(report)
    assert [check["check"] for check in report["checks"]] == CHECKS


def test_on_the_device(device, tmp_path):
    report = gpu_check.checked(device, tmp_path)
    assert report["ok"], gpu_check.shown(report)
