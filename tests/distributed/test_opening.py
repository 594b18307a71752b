"""Tests which commit several ranks open, and which stores go together."""

import pytest

from memascend.distributed.opening import common_of
from memascend.errors import ConfigError


def store(run, *numbers, damage=None):
    """What is said of a store whose roots name these commits, the newest first."""
    commits = [{"run": run * 16, "number": number, "identity": f"{number:032x}", "ranks": 0} for number in numbers]
    return {"there": True, "filled": True, "commits": commits, "damage": damage, "error": None}


@pytest.mark.parametrize(
    ("stores", "newest"),
    [
        ([store("aa", 3, 2), store("aa", 3, 2)], 3),
        ([store("aa", 3, 2), store("aa", 2, 1)], 2),
        ([store("aa", 3, 2), store("aa", 4, 3), store("aa", 3, 2)], 3),
    ],
)
def test_the_newest_that_all_have(stores, newest):
    assert common_of(stores) == (newest, newest.to_bytes(16))


@pytest.mark.parametrize("last", [store("bb", 3, 2), store("bb", 4, 3), store("bb", 9)])
@pytest.mark.parametrize("count", [1, 3])
def test_stores_of_several_runs_do_not_go_together_though_their_numbers_do(last, count):
    with pytest.raises(ConfigError, match=f"several runs.*rank {count}: is of run bbbbbbbb"):
        common_of([*[store("aa", 3, 2)] * count, last])


def test_stores_without_a_common_commit_do_not():
    with pytest.raises(ConfigError, match="no commit is there on every rank"):
        common_of([store("aa", 3, 2), store("aa", 5, 4)])
