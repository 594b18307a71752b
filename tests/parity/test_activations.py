"""Tests checkpointed activations on storage: the same bits as in memory."""

import dataclasses

import pytest
from parity import harness
from parity.harness import Mode
from parity.zoo_transformers import TRANSFORMERS

from memascend.activations import activations

CASES = {case.name: case for case in TRANSFORMERS if case.name in ("checkpointed", "checkpointed-reentrant")}
MODES = [
    # Pieces of one page in three chunks: almost nothing stays in memory. Then everything in one chunk each.
    ({4096: 3}, Mode("fused", "smallest", 1)),
    pytest.param({1 << 20: 8}, Mode("ssd", "large", 2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("chunks", "mode"), MODES, ids=["small", "usual"])
def test_models_of_others(name, chunks, mode, tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "BYTES_MIN", 1)
    monkeypatch.setattr(activations, "CHUNKS", chunks)
    kept = []
    restored = activations.Activations.restore
    monkeypatch.setattr(activations.Activations, "restore", lambda self, one: kept.append(1) or restored(self, one))
    case = dataclasses.replace(CASES[name], options={"activations": "ssd"})
    # The reference has no such option.
    harness.reference(CASES[name], mode.threads)
    harness.check(case, mode, tmp_path)
    assert kept, "nothing was kept on storage: this test could not fail"
