"""Tests several processes saving to one folder: one succeeds, none removes another's files."""

from __future__ import annotations

import contextlib

import pytest

from memascend.checkpoint.files import new_folder, put_in_place
from memascend.errors import UsageError


@pytest.fixture
def target(tmp_path):
    return tmp_path / "saved"


@pytest.mark.parametrize("is_there", [False, True])
def test_who_comes_second_is_told_and_takes_nothing_away(target, is_there):
    if is_there:
        target.mkdir()
    with new_folder(target) as new:
        (new / "part").write_text("mine")
        for _ in range(2):
            with pytest.raises(UsageError, match="another process is saving"), new_folder(target):
                pass
            assert (new / "part").read_text() == "mine"
    assert not new.exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_it_is_locked_until_the_end_also_once_the_folder_is_in_its_place(target, is_there):
    if is_there:
        (target / "memascend").mkdir(parents=True)
        (target / "memascend" / "manifest.json").write_text("{}")
    with new_folder(target) as new:
        (new / "part").write_text("mine")
        put_in_place(target, new)
        assert new.exists() == is_there, "the earlier one, until the end"
        with pytest.raises(UsageError, match="another process is saving"), new_folder(target):
            pass
    assert (target / "part").read_text() == "mine"
    assert [*target.parent.iterdir()] == [target]


def test_what_a_killed_saver_left_is_gone(target):
    with contextlib.suppress(KeyError), new_folder(target) as new:
        raise KeyError
    new.mkdir()
    (new / "part").write_text("left")
    new.with_name(".saved.memascend-lock").touch()
    with new_folder(target) as new:
        assert not any(new.iterdir())
