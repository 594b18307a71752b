"""Tests volumes: reads and writes at any address, rejected arguments, stripes, closing, and random operations."""

import ctypes
import gc
import os
import random
import stat
import subprocess
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.disks import read

from memascend import ConfigError, StorageError, UsageError, memory, nvme

MIB = 1 << 20


@pytest.fixture
def volume(path, backend):
    with nvme.open(path, size=16 * MIB, backend=backend) as volume:
        yield volume


def lease(nbytes):
    region = memory.Region(nbytes, pin=False)
    return memory.Arena(region, {nbytes: 1}).lease(nbytes).tensor(nbytes, torch.uint8)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.complex64]
)
def test_tensor_of_any_dtype_reads_back_equal(volume, dtype):
    tensor = torch.arange(10_007).remainder(2).to(dtype)
    nbytes = tensor.numel() * tensor.element_size()
    assert volume.write(tensor, 12_345).wait() == nbytes
    back = torch.zeros_like(tensor)
    assert volume.read(back, 12_345).wait() == nbytes
    assert torch.equal(back, tensor)


def test_volume_reads_and_writes_buffers_of_all_kinds(volume):
    import array
    import mmap

    volume.write(b"read-only bytes", 7).wait()
    numbers = array.array("d", [1.0, 2.0, 3.0])
    volume.write(numbers, 100).wait()
    assert read(volume, 15, 7) == b"read-only bytes"
    back = array.array("d", [0.0] * 3)
    volume.read(memoryview(back), 100).wait()
    assert back == numbers
    with mmap.mmap(-1, 8192) as mapped:
        volume.read(mapped, 0).wait()
        assert mapped[7:22] == b"read-only bytes"
    assert volume.write(b"", 0).wait() == 0
    assert volume.read(bytearray(), volume.size).wait() == 0


def test_aligned_buffers_are_not_bounced_and_unaligned_ones_are_exact(volume):
    tensor = lease(4 * MIB)
    tensor.copy_(torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8))
    volume.write(tensor, MIB).wait()
    assert volume.stats()["bounced_bytes"] == 0
    back = lease(4 * MIB)
    volume.read(back, MIB).wait()
    assert torch.equal(back, tensor)
    assert volume.stats()["bounced_bytes"] == 0
    # If an aligned buffer has an odd length, the volume copies (bounces) only the end of the buffer. It writes the rest
    # directly.
    volume.write(tensor[: 3 * MIB + 5], MIB).wait()
    assert 0 < volume.stats()["bounced_bytes"] < 4096
    volume.write(tensor[1:1000], 77).wait()
    part = torch.zeros(999, dtype=torch.uint8)
    volume.read(part, 77).wait()
    assert torch.equal(part, tensor[1:1000])


def test_random_operations_agree_with_a_bytearray(volume):
    worker = Worker(0)
    for _ in range(60):
        worker.batch(volume)
    volume.flush()
    worker.check(volume)


def test_operation_keeps_its_buffer_until_it_ends_and_no_longer(volume):
    class Bytes(bytearray):
        pass

    data = Bytes(b"x" * (8 * MIB))
    watch = weakref.ref(data)
    ticket = volume.write(data, 3)
    del data
    ticket.wait()
    gc.collect()
    assert watch() is None, "a finished ticket must release its buffer"
    # The loop keeps neither the tickets nor the tensors. Even so, a tensor's memory must not be reused while the volume
    # writes the tensor.
    for round_ in range(15):
        tensor = torch.full((MIB,), round_, dtype=torch.uint8)
        volume.write(tensor, round_ * MIB + 7)
        del tensor
        torch.full((MIB,), 255, dtype=torch.uint8)
    volume.flush()
    into = torch.zeros(1000, dtype=torch.uint8)
    for round_ in range(15):
        volume.read(into, round_ * MIB + 7 + 500_000).wait()
        assert into.eq(round_).all(), round_


def test_a_buffer_in_flight_cannot_be_resized(volume):
    data = bytearray(8 * MIB)
    ticket = volume.read(data, 1)
    with pytest.raises(BufferError):
        data.extend(b"more")
    ticket.wait()
    data.extend(b"more")


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (torch.zeros(4, 4).t(), "not contiguous"),
        (torch.zeros(4, device="meta"), "CPU"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "conjugate"),
        (torch.eye(3).to_sparse(), "not contiguous"),
        (memoryview(bytearray(10))[::2], "not contiguous"),
        (b"constant", "read-only"),
        ([1, 2], "not list"),
        (None, "not NoneType"),
    ],
)
def test_memory_that_cannot_be_read_into_is_refused(volume, memory, says):
    with pytest.raises(ConfigError, match=says):
        volume.read(memory, 0)
    assert volume.stats()["in_flight"] == 0


@pytest.mark.parametrize("offset", [-1, 1.5, "0", None, 1 << 64])
def test_write_rejects_an_offset_that_is_no_integer_from_0_up(volume, offset):
    with pytest.raises(ConfigError, match="offset must be an integer"):
        volume.write(b"1", offset)


def test_a_file_is_private_reserved_and_without_header(path):
    with nvme.open(path, size=5 * MIB) as volume:
        volume.write(b"first", 0).wait()
        assert volume.size == 5 * MIB
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_blocks * 512 >= 5 * MIB
    assert path.read_bytes()[:5] == b"first"


def test_open_grows_a_file_to_its_size_and_never_truncates_it(path):
    with pytest.raises(ConfigError, match="does not exist; pass size="):
        nvme.open(path)
    assert not path.exists()
    with nvme.open(path, size=10_001) as volume:
        assert volume.size == 10_001
        volume.write(b"end", 9_998).wait()
        with pytest.raises(ConfigError):
            volume.write(b"end", 9_999)
    with nvme.open(path, size=MIB) as volume:
        assert volume.size == MIB
        assert read(volume, 3, 9_998) == b"end"
    with nvme.open(path, size=4096) as volume:
        assert volume.size == 4096
    assert path.stat().st_size == MIB, "a smaller size truncates nothing"
    with nvme.open(path) as volume:
        assert volume.size == MIB


def test_a_file_of_odd_length_keeps_every_byte(path):
    path.write_bytes(bytes(range(256)) * 3 + b"tail")
    with nvme.open(path) as volume:
        assert volume.size == 772
        assert read(volume, 772) == bytes(range(256)) * 3 + b"tail"
        volume.write(b"TAIL", 768).wait()
    assert path.read_bytes()[768:772] == b"TAIL"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": 0}, "0 bytes"),
        ({"size": -1}, "size must be"),
        ({"size": 1 << 63}, "more than"),
        ({"queue_depth": 0}, "queue_depth"),
        ({"queue_depth": 100_000}, "queue_depth"),
        ({"stripe": 1000}, "stripe"),
        ({"backend": "aio"}, "io_uring"),
    ],
)
def test_open_rejects_wrong_options_and_creates_no_file(path, options, says):
    with pytest.raises((ConfigError, StorageError), match=says):
        nvme.open(path, **{"size": 4096, **options})
    assert not path.exists()


def test_open_rejects_wrong_paths_and_leaves_no_file(tmp_path, path):
    for paths, says in [
        ([], "1 to 32 devices"),
        (tmp_path, "is a folder"),
        ("/dev/null", "neither a file nor a block device"),
        ([path, path], "same device"),
        (b"bytes", "not a path|must be a path"),
        ("", "not a path"),
    ]:
        with pytest.raises(ConfigError, match=says):
            nvme.open(paths, size=4096)
    with pytest.raises(StorageError) as caught:
        nvme.open(tmp_path / "nowhere" / "file", size=4096)
    assert caught.value.errno == 2
    assert list(tmp_path.iterdir()) == [], "a failed open must remove the files that it made"


@pytest.mark.parametrize("devices", [2, 3])
def test_striped_volume_grows_and_reads_back_its_data(tmp_path, backend, devices):
    paths = [tmp_path / f"device{index}" for index in range(devices)]
    data = random.Random(1).randbytes(5 * MIB + 1234)
    with nvme.open(paths, size=devices * 2 * MIB + 5, stripe=65536, backend=backend) as volume:
        assert volume.size == devices * 2 * MIB + 5
    with nvme.open(paths, size=devices * 4 * MIB, stripe=65536, backend=backend) as volume:
        volume.write(data, 777).wait()
        volume.flush()
    sizes = {path.stat().st_size for path in paths}
    assert len(sizes) == 1
    with nvme.open(paths, stripe=65536, backend=backend) as volume:
        assert read(volume, len(data), 777) == data
    with nvme.open(paths[0]) as first:
        assert read(first, 100, 777) == data[:100]


# --- closing, and the interpreter's exit -------------------------------------------------


def test_finished_ticket_is_done_and_waits_again_at_once(volume):
    ticket = volume.write(b"1" * 5000, 0)
    assert ticket.wait() == 5000
    assert ticket.done()
    assert ticket.wait(timeout=0) == 5000
    with pytest.raises(ConfigError, match="timeout"):
        ticket.wait(timeout=-1)


def test_close_completes_writes_and_rejects_later_calls(path, backend):
    volume = nvme.open(path, size=64 * MIB, backend=backend)
    tickets = [volume.write(bytes([index]) * (4 * MIB), index * 4 * MIB + index) for index in range(15)]
    volume.close()
    assert all(ticket.done() for ticket in tickets)
    assert [ticket.wait() for ticket in tickets] == [4 * MIB] * 15
    volume.close()
    assert volume.closed
    for call in (volume.flush, lambda: volume.read(bytearray(1), 0), lambda: volume.write(b"1", 0)):
        with pytest.raises(UsageError, match="closed"):
            call()
    with nvme.open(path) as again:
        assert read(again, 4 * MIB, 9 * 4 * MIB + 9) == bytes([9]) * (4 * MIB)


def test_closed_volumes_leave_no_descriptor_and_no_thread(path):
    with nvme.open(path, size=MIB) as volume:
        volume.write(b"unaligned", 1).wait()
    before = held()[:2]
    for backend in ["io_uring", "threads"] * 5:
        with nvme.open(path, backend=backend) as volume:
            volume.write(b"unaligned", 1).wait()
            with pytest.raises(StorageError):
                nvme.open(path)
    assert held()[:2] == before


def test_interpreter_exit_completes_pending_writes(path, child):
    child(
        """
        import sys, torch
        from memascend import nvme
        volume = nvme.open(sys.argv[1], size=1 << 26)
        for index in range(16):
            volume.write(torch.full((1 << 22,), index, dtype=torch.uint8), index << 22)
        """,
        path,
    )
    data = path.read_bytes()
    assert all(data[index << 22 : (index + 1) << 22].count(index) == 1 << 22 for index in range(16))


def test_tmpfs_volume_works_and_reports_whether_it_is_direct(tmp_path):
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
    try:
        with nvme.open(folder / "file", size=MIB) as volume:
            volume.write(b"bytes", 3).wait()
            assert read(volume, 5, 3) == b"bytes"
            assert volume.direct == all(device["why_buffered"] is None for device in volume.devices())
    finally:
        subprocess.run(["umount", folder], check=True)


def test_volume_repr_devices_and_stats_describe_the_volume(path):
    with nvme.open(path, size=MIB, backend="threads", queue_depth=3) as volume:
        assert "threads" in repr(volume)
        assert str(path) in repr(volume)
        assert (volume.backend, volume.queue_depth, volume.closed, volume.paths) == ("threads", 3, False, (str(path),))
        (device,) = volume.devices()
        assert device == {"path": str(path), "kind": "file", "bytes": MIB, "why_buffered": None}
        volume.write(b"1" * 100, 5).wait()
        volume.flush()
        stats = volume.stats()
        assert stats["written"]["bytes"] == 100
        assert (stats["written"]["operations"], stats["flushes"], stats["bounced_bytes"]) == (1, 1, 100)
    assert "closed" in repr(volume)


SECONDS = float(os.environ.get("MEMASCEND_SOAK_SECONDS", "240"))
THREADS, SHARE = 4, 12 * MIB
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # mallopt's option numbers, from malloc.h


class Worker:
    """Runs random operations on one share of the volume. `model` has the bytes that this share should contain."""

    def __init__(self, number):
        self.choose = random.Random(number)
        self.start, self.model = number * SHARE, bytearray(SHARE)
        self.aligned = lease(2 * MIB)
        self.operations = 0
        self.loose = False

    def place(self):
        nbytes = self.choose.choice([1, 17, 512, 4096, 10_001, 65_536, MIB, 2 * MIB, 3 * MIB + 7])
        nbytes = self.choose.randrange(nbytes) + 1 if self.choose.random() < 0.5 else nbytes
        offset = self.choose.randrange(SHARE - nbytes)
        return (offset // 4096 * 4096 if self.choose.random() < 0.4 else offset), nbytes

    def batch(self, volume):
        """Starts writes and reads of ranges that do not overlap.

        Drops some of the tickets, and waits for the other tickets. Checks the bytes that the reads return.
        """
        if self.loose:
            # Writes whose tickets were dropped may still be in flight, and the next operations may overlap these
            # writes.
            volume.flush()
        taken, tickets, self.loose = [], [], False
        for _ in range(self.choose.randrange(1, 10)):
            offset, nbytes = self.place()
            if any(offset < end and start < offset + nbytes for start, end in taken):
                continue
            taken.append((offset, offset + nbytes))
            if self.choose.random() < 0.4:
                into = bytearray(nbytes)
                tickets.append((volume.read(into, self.start + offset), offset, into))
                continue
            data = self.choose.randbytes(nbytes)
            self.model[offset : offset + nbytes] = data
            if nbytes <= 2 * MIB and self.choose.random() < 0.3:
                # Writes from the aligned buffer. Waits for this write, because the next write reuses the buffer.
                self.aligned[:nbytes] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                volume.write(self.aligned[:nbytes], self.start + offset).wait()
            else:
                ticket = volume.write(data, self.start + offset)
                if self.choose.random() < 0.6:
                    tickets.append((ticket, offset, None))
                else:
                    self.loose = True
            self.operations += 1
        self.choose.shuffle(tickets)
        for ticket, offset, into in tickets:
            ticket.wait()
            assert into is None or into == self.model[offset : offset + len(into)]

    def check(self, volume):
        assert read(volume, SHARE, self.start) == self.model
        self.loose = False


def held():
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def one_round(workers, volume):
    """Runs all workers at the same time. Each worker checks its share, then runs new batches."""

    def work(worker):
        worker.check(volume)
        for _ in range(30):
            worker.batch(volume)

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(work, workers))


@pytest.mark.soak
def test_random_operations_for_minutes_stay_correct_and_leak_nothing(tmp_path):
    # Makes glibc use mappings for large objects, and one heap for all threads. The memory of a large object then leaves
    # the process as soon as the object is freed.
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_THRESHOLD, 16384) == 1
    assert libc.mallopt(M_ARENA_MAX, 1) == 1
    choose = random.Random(time.time_ns())
    workers = [Worker(number) for number in range(THREADS)]
    paths = [tmp_path / f"device{index}" for index in range(2)]
    with nvme.open(paths, size=THREADS * SHARE) as volume:
        volume.write(bytes(THREADS * SHARE), 0).wait()
    after_first = None
    deadline = time.monotonic() + SECONDS
    rounds = 0
    while time.monotonic() < deadline:
        backend, depth = choose.choice(["io_uring", "threads"]), choose.choice([1, 2, 8, 32])
        volume = nvme.open(paths, backend=backend, queue_depth=depth)
        one_round(workers, volume)
        # While writes are in flight, one round of three drops the volume without close(). Another round calls close()
        # twice, and the third round calls close() once.
        if rounds % 3:
            volume.close()
        if rounds % 3 == 1:
            volume.close()
        del volume
        rounds += 1
        if rounds == 10:
            after_first = held()
    if after_first is not None:
        descriptors, tasks, resident = held()
        assert (descriptors, tasks) == after_first[:2]
        assert resident < after_first[2] + 16 * MIB, "the process leaked memory"
    print(f"{rounds} rounds, {sum(worker.operations for worker in workers)} writes")
