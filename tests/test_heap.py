"""The heap's thresholds: fixed while gradients could fragment it, let go where activations outweigh the model."""

from __future__ import annotations

import mmap
from typing import Any

import pytest

from memascend import heap

MODEL_BYTES = 1 << 20
MMAP, TRIM = -3, -1


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    for name in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    made: list[tuple[int, int]] = []

    def note(option: int, value: int) -> bool:
        made.append((option, value))
        return True

    monkeypatch.setattr(heap, "_set", note)
    return made


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each trim of the heap is said to take; those to come are put there by the test."""
    seconds: list[float] = []
    clock = 0.0

    def trim() -> None:
        nonlocal clock
        clock += seconds.pop(0)

    monkeypatch.setattr(heap, "trim", trim)
    monkeypatch.setattr(heap.time, "thread_time", lambda: clock)
    return seconds


def _steps(watched: heap.Heap, monkeypatch: pytest.MonkeyPatch, mapped: list[int]) -> None:
    faults = 0

    class Usage:
        ru_minflt = 0

    def usage(_who: int) -> Any:
        result = Usage()
        result.ru_minflt = faults
        return result

    monkeypatch.setattr(heap.resource, "getrusage", usage)
    for nbytes in mapped:
        faults += nbytes // mmap.PAGESIZE
        watched.step_ended()


def test_a_step_of_gradients_leaves_it_fixed(options: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    watched = heap.Heap(MODEL_BYTES)
    _steps(watched, monkeypatch, [100 * MODEL_BYTES, 2 * MODEL_BYTES, 7 * MODEL_BYTES])
    assert options == [(MMAP, 32 << 10)]
    assert watched.steady


def test_a_step_of_activations_lets_it_go(options: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    watched = heap.Heap(MODEL_BYTES)
    _steps(watched, monkeypatch, [100 * MODEL_BYTES, 9 * MODEL_BYTES, 9 * MODEL_BYTES])
    assert options == [(MMAP, 32 << 10), (MMAP, 32 << 20), (TRIM, -1)]
    assert not watched.steady


@pytest.mark.usefixtures("options")
def test_what_is_free_is_given_back_after_each_step(trims: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    trims += [0.0004] * 3
    _steps(heap.Heap(MODEL_BYTES), monkeypatch, [MODEL_BYTES] * 3)
    assert trims == []


@pytest.mark.usefixtures("options")
def test_a_heap_that_takes_long_to_look_through_is_left(trims: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    trims += [0.0004, 0.02, 0.0004]
    _steps(heap.Heap(MODEL_BYTES), monkeypatch, [MODEL_BYTES] * 3)
    assert trims == [0.0004]


@pytest.mark.usefixtures("options")
def test_a_heap_that_keeps_is_not_given_back(trims: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    trims += [0.0004] * 3
    _steps(heap.Heap(MODEL_BYTES), monkeypatch, [MODEL_BYTES, 9 * MODEL_BYTES, MODEL_BYTES])
    assert len(trims) == 2


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_chose_stands(options: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    watched = heap.Heap(MODEL_BYTES)
    _steps(watched, monkeypatch, [100 * MODEL_BYTES] * 3)
    assert options == []


def test_glibc_takes_the_options() -> None:
    assert heap._set(MMAP, 32 << 10)
    heap.trim()
