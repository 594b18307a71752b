"""Tests that offload() says how long storage and the update take of a step, as far as that can be told."""

import logging

import pytest
import torch

import memascend
from memascend.session import open_store


def begun(path, caplog, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(6)))
    original = torch.optim.AdamW(model.parameters())
    with caplog.at_level(logging.INFO, "memascend"):
        caplog.clear()
        _, optimizer = memascend.offload(model, original, storage=path, device="cpu", **options)
    (line,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("host_memory"))
    return optimizer, line


@pytest.mark.parametrize("part", ["none", "all"])
def test_the_log_line_says_seconds(tmp_path, caplog, monkeypatch, part):
    monkeypatch.setattr(open_store, "_BYTES_MIN", 1 << 10)
    options = {"host_memory": "64MiB"} if part == "all" else {}
    for existing in ("refuse", "resume"):
        optimizer, line = begun(tmp_path / "store", caplog, existing=existing, **options)
        with optimizer:
            assert "which takes storage and the update about" in line
            assert line.count("instead of") == (2 if part == "all" else 0)
            assert ("with host_memory=" in line) == (part == "none")


def test_of_a_small_store_nothing_is_told(tmp_path, caplog):
    optimizer, line = begun(tmp_path / "store", caplog)
    with optimizer:
        assert "a step moves" in line
        assert "which takes" not in line


def test_a_probe_ends_where_it_is_told(tmp_path, caplog):
    optimizer, _ = begun(tmp_path / "store", caplog)
    with optimizer:
        engine, store = optimizer._session.run.resources.engine, optimizer._session.run.resources.store
        before = store.counters()["read_bytes"]
        nbytes, seconds = engine.probe(1 << 30, 60.0)
        # Values, and two moments: all that is live, whole pages of each piece.
        elements = 6 * (128 * 128 + 128)
        assert nbytes == store.counters()["read_bytes"] - before
        assert 12 * elements <= nbytes <= 12 * elements + 12 * 2 * 4096
        assert seconds > 0
        assert 0 < engine.probe(1, 60.0)[0] <= nbytes
        assert engine.probe(1 << 30, 0.0)[0] == 0
