"""Tests each error, and that it crosses to another process whole."""

import pickle

import pytest

import memascend

ERRORS = [
    (memascend.ConfigError("wrong"), ValueError),
    (memascend.BudgetError("small", smallest=7), MemoryError),
    (memascend.MemoryLimitError("none", needed=9, available=None), MemoryError),
    (memascend.StorageError("full", errno=28, path="/x", offset=4096, nbytes=512), OSError),
    (memascend.CorruptionError("flipped", path="/x", offset=0, nbytes=1), memascend.StorageError),
    (memascend.DeviceError("lost"), RuntimeError),
    (memascend.RankError("gone", ranks=(1, 3)), RuntimeError),
    (memascend.UsageError("not now"), RuntimeError),
    (memascend.TimeoutExpired("late"), TimeoutError),
]


@pytest.mark.parametrize(("error", "also"), ERRORS)
def test_an_error_is_what_users_catch_and_survives_pickling(error, also):
    assert isinstance(error, also)
    assert isinstance(error, memascend.MemascendError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    attributes = ("smallest", "needed", "available", "errno", "path", "offset", "nbytes", "ranks")
    assert [getattr(copy, name, None) for name in attributes] == [getattr(error, name, None) for name in attributes]
