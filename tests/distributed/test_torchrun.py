"""Tests runs that torchrun starts, in fresh processes: killed, restarted, resumed by another number, saved, loaded."""

import pytest
from support import torchrun_loop, torchrun_materialized
from support.bits import files
from support.torchrun import torchrun

import memascend

pytestmark = pytest.mark.timeout(600)


def test_a_killed_run_is_restarted_and_then_resumed_by_three_ranks(tmp_path):
    """With the bits of one process; torch's own group needs a store of its own in each attempt."""
    (tmp_path / "ranks").mkdir()
    two = torchrun(
        torchrun_loop.__file__, tmp_path / "ranks", 3, 1, options=("--standalone", "--max-restarts", "1"),
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )  # fmt: skip
    # The killed rank may have been the only one to commit its second step.
    assert "rank 0 resumed at step 1" in two
    assert "rank 1 resumed at step 1" in two
    three = torchrun(torchrun_loop.__file__, tmp_path / "ranks", 5, count=3)
    assert three.count("resumed at step 3") == 3
    (tmp_path / "one").mkdir()
    torchrun_loop.train(tmp_path / "one", 3)
    torchrun_loop.train(tmp_path / "one", 5)
    for steps in (3, 5):
        saved = files(tmp_path / f"one/saved-{steps}")
        assert files(tmp_path / f"ranks/saved-{steps}") == saved
        assert files(tmp_path / f"ranks/loaded-{steps}") == saved


def test_weights_are_changed_within_materialized_on_all_ranks_or_on_none(tmp_path):
    """With the bits of one process; a rank that raises inside or dies there is named, and no rank has committed."""
    told = torchrun(torchrun_materialized.__file__, tmp_path, status=1)
    for modify in (True, False):
        assert f"rank 0, modify={modify}: ['RankError', 1], unchanged: True" in told, told
        assert f"rank 1, modify={modify}: ['AssertionError'], unchanged: True" in told, told
    for rank in (0, 1):
        assert f"rank {rank}, staged: a step is staged" in told, told
        assert f"rank {rank}: 2 steps" in told, told
    assert "rank 0, dead: (1,), in time: True" in told, told
    torchrun_materialized.change(tmp_path, "one")
    saved = files(tmp_path / "one-saved")
    for name in ("replicated", "sharded"):
        assert files(tmp_path / f"{name}-saved") == saved
    with memascend.engine.Store.open(tmp_path / "faults/rank-0-of-2/memascend.store") as store:
        assert store.step == 2
        assert store.read("embed.weight")[0].any()
