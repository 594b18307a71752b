"""Tests runs that torchrun starts, in fresh processes: killed, restarted, resumed by another number, saved, loaded."""

import pytest
from support import torchrun_faults, torchrun_loop
from support.torchrun import torchrun

pytestmark = pytest.mark.timeout(600)


def files(folder):
    """The bytes of a checkpoint, but for the manifest, which names the store."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


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


def test_a_rank_that_raises_hangs_or_dies_is_named_on_all_others(tmp_path):
    told = torchrun(torchrun_faults.__file__, tmp_path, count=3, status=1)
    for kind in ("raises", "hangs", "dies"):
        for rank in (0, 2):
            assert f"rank {rank}, {kind}: ['RankError', 1] after" in told, told
