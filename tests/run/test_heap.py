"""Tests the heap's thresholds: fixed while gradients could fragment it, released where activations dominate."""

from __future__ import annotations

import mmap
from typing import Any

import pytest

from memascend.run import heap

MODEL_BYTES = 1 << 20
MMAP, TRIM = -3, -1
FIXED, KEPT = [(MMAP, 32 << 10)], [(MMAP, 32 << 20), (TRIM, -1)]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    monkeypatch.setattr(heap.Holes, "take", lambda _: 0)
    for name in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    made: list[tuple[int, int]] = []

    def note(option: int, value: int) -> bool:
        made.append((option, value))
        return True

    monkeypatch.setattr(heap, "_set", note)
    return made


class _Clock:
    """Of a machine on which nothing takes time, but what a test says."""

    def __init__(self) -> None:
        self.wall = 1000.0
        self.processor = 0.0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.processor


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(heap, "time", clock)
    return clock


@pytest.fixture
def trims(clock: _Clock, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each trim of the heap is said to take; those to come are put there by the test."""
    seconds: list[float] = []

    def trim() -> None:
        clock.processor += seconds.pop(0)

    monkeypatch.setattr(heap, "trim", trim)
    return seconds


def _steps(watched: heap.Heap, monkeypatch: pytest.MonkeyPatch, mapped: list[int], clock: _Clock | None = None) -> None:
    """Steps of a second each."""
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
        if clock is not None:
            clock.wall += 1.0
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


def _held(
    monkeypatch: pytest.MonkeyPatch, touched: int, mapped: list[int | None], tops: list[int], *, peak: int = 16 << 20
) -> heap.Heap:
    """Steps beside held entries: what each maps at once, and where the heap ends once it is tried and after that."""
    # A model beside which no step is one of activations.
    watched = heap.Heap(1 << 30, peak)

    class Library:
        def sbrk(self, _more: int) -> int:
            return tops.pop(0)

    class Looked:
        def step_ended(self) -> None:
            watched.look()
            watched.step_ended()

    monkeypatch.setattr(heap, "c_library", Library)
    monkeypatch.setattr(heap, "trim", lambda: None)
    monkeypatch.setattr(heap, "mapped_bytes", lambda: mapped.pop(0))
    looked: Any = Looked()
    _steps(looked, monkeypatch, [touched] * len(mapped))
    return watched


def test_beside_held_entries_it_keeps_what_is_freed(
    options: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was mapped at once comes from the heap now, and a tenth more of what is held."""
    watched = _held(monkeypatch, 8 << 20, [9 << 20, 5 << 20, 2 << 20], [100 << 20, (104 << 20) + (6 << 20) // 10])
    assert options == FIXED + KEPT
    assert not watched.steady


def test_a_heap_that_grows_too_far_is_fixed_again(
    options: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tops = [100 << 20, 105 << 20]
    watched = _held(monkeypatch, 8 << 20, [9 << 20, 5 << 20, 2 << 20], tops)
    watched.look()
    watched.step_ended()
    assert options == FIXED + KEPT + [*FIXED, (TRIM, 128 << 10)]
    assert watched.steady
    assert tops == []


@pytest.mark.parametrize(
    ("touched", "peak", "mapped"),
    [
        pytest.param((16 << 20) + mmap.PAGESIZE, 16 << 20, 5 << 20, id="it-could-grow-by-much"),
        pytest.param(8 << 20, 0, 5 << 20, id="nothing-is-held"),
        # An older C library, or another one.
        pytest.param(8 << 20, 16 << 20, None, id="not-known"),
    ],
)
def test_it_stays_fixed_where_much_could_come_of_it(
    options: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, touched: int, peak: int, mapped: int
) -> None:
    watched = _held(monkeypatch, touched, [mapped] * 4, [], peak=peak)
    assert options == FIXED
    assert watched.steady


def test_glibc_says_what_it_mapped(loaded: Any) -> None:
    program = """if True:
        import torch
        from memascend.run.heap import _set, mapped_bytes

        assert _set(-3, 32 << 10)
        before = mapped_bytes()
        if before is not None:
            kept = torch.empty(5 << 20, dtype=torch.uint8)
            assert 5 << 20 <= mapped_bytes() - before < 6 << 20
    """
    loaded(program)


@pytest.mark.usefixtures("options")
def test_what_is_free_is_given_back_after_each_step(
    trims: list[float], clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims += [0.0004, 0.009, 0.0004]
    _steps(heap.Heap(MODEL_BYTES), monkeypatch, [MODEL_BYTES] * 3, clock)
    assert trims == []


@pytest.mark.usefixtures("options")
def test_a_heap_that_takes_long_to_look_through_waits(
    trims: list[float], clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trim takes is at most a hundredth of the time, and one that took long is not the last."""
    trims += [0.025, 0.0004, 0.0004]
    watched = heap.Heap(MODEL_BYTES)
    left = []
    for _ in range(5):
        _steps(watched, monkeypatch, [MODEL_BYTES], clock)
        left.append(len(trims))
    assert left == [2, 2, 2, 1, 0]


@pytest.mark.usefixtures("options")
def test_a_heap_that_keeps_is_not_given_back(
    trims: list[float], clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims += [0.0004] * 3
    _steps(heap.Heap(MODEL_BYTES), monkeypatch, [MODEL_BYTES, 9 * MODEL_BYTES, MODEL_BYTES], clock)
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


def test_what_a_freed_model_leaves_in_the_heap_is_used_by_nobody(loaded: Any) -> None:
    """Between its tensors lies what stays, so that the heap cannot shrink; later tensors are not put there."""
    program = """if True:
        import gc, torch
        from memascend.run.heap import Heap, _set

        def resident():
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) << 10

        # As glibc has it once something large was freed.
        assert _set(-3, 32 << 20)
        heap = Heap(1)
        assert _set(-3, 32 << 20)
        before = resident()
        model, kept = [], []
        for index in range(100):
            # Of no size that fits a piece.
            model.append(torch.ones((1 << 18) + 4000 * (index % 7)))
            kept.append(torch.ones(1000))
        assert resident() - before > 100 << 20
        in_heap = [one.data_ptr() for one in model]
        del model
        assert _set(-3, 32 << 10)
        heap.model_left()
        assert resident() - before < 3 << 20, resident() - before
        later = [torch.ones(1 << 16) for _ in range(200)]
        low, high = min(in_heap), max(in_heap)
        assert not [one for one in later if low <= one.data_ptr() <= high]
        del later
        assert resident() - before < 4 << 20, resident() - before
        heap.close()
        again = [torch.ones(1 << 16) for _ in range(200)]
        assert [one for one in again if low <= one.data_ptr() <= high]
    """
    loaded(program)
