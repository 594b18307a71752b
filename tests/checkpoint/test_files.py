"""Tests several processes saving to one folder: one succeeds, none removes another's files."""

from __future__ import annotations

import contextlib
import os

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
def test_what_another_began_after_the_folder_went_into_its_place_stays(target, is_there):
    if is_there:
        (target / "memascend").mkdir(parents=True)
        (target / "memascend" / "manifest.json").write_text("{}")
    with new_folder(target) as new:
        (new / "part").write_text("mine")
        put_in_place(target, new)
        if is_there:
            assert not (new / "part").exists(), "the earlier one, until the end"
            with pytest.raises(UsageError, match="another process is saving"), new_folder(target):
                pass
            os.rename(new, new.with_name("earlier"))
        # Another, from here on.
        new.mkdir()
        (new / "part").write_text("theirs")
    assert (target / "part").read_text() == "mine"
    assert (new / "part").read_text() == "theirs"


def test_what_a_killed_saver_left_is_gone(target):
    with contextlib.suppress(KeyError), new_folder(target) as new:
        raise KeyError
    new.mkdir()
    (new / "part").write_text("left")
    with new_folder(target) as new:
        assert not any(new.iterdir())
