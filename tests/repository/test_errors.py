"""Tests each error, and that it crosses to another process whole."""

import pickle

import pytest

import memascend

ERRORS = [
    memascend.ConfigError("wrong"),
    memascend.BudgetError("small", smallest=7),
    memascend.MemoryLimitError("none", needed=9, available=None),
    memascend.StorageError("full", errno=28, path="/x", offset=4096, nbytes=512),
    memascend.CorruptionError("flipped", path="/x", offset=0, nbytes=1),
    memascend.DeviceError("lost"),
    memascend.RankError("gone", ranks=(1, 3)),
    memascend.UsageError("not now"),
    memascend.TimeoutExpired("late"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    attributes = ("smallest", "needed", "available", "errno", "path", "offset", "nbytes", "ranks")
    assert [getattr(copy, name, None) for name in attributes] == [getattr(error, name, None) for name in attributes]


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (memascend.ConfigError, ValueError),
        (memascend.BudgetError, MemoryError),
        (memascend.MemoryLimitError, MemoryError),
        (memascend.StorageError, OSError),
        (memascend.CorruptionError, memascend.StorageError),
        (memascend.DeviceError, RuntimeError),
        (memascend.RankError, RuntimeError),
        (memascend.UsageError, RuntimeError),
        (memascend.TimeoutExpired, TimeoutError),
    ],
)
def test_an_error_is_what_users_catch(error, also):
    assert issubclass(error, also)
    assert issubclass(error, memascend.MemascendError)
