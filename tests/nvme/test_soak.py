"""Tests minutes of random operations, drops and closes, every byte checked, for leaks; `make soak` runs it."""

import ctypes
import gc
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.disks import read

from memascend import memory, nvme

MIB = 1 << 20
SECONDS = float(os.environ.get("MEMASCEND_SOAK_SECONDS", "240"))
THREADS, SHARE = 4, 12 * MIB
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # from malloc.h


class Worker:
    """One thread's share of the volume, and what should be in it."""

    def __init__(self, number):
        self.choose = random.Random(number)
        self.start, self.model = number * SHARE, bytearray(SHARE)
        region = memory.Region(2 * MIB, pin=False)
        self.aligned = memory.Arena(region, {2 * MIB: 1}).lease(2 * MIB).tensor(2 * MIB, torch.uint8)
        self.operations = 0
        self.loose = False

    def place(self):
        nbytes = self.choose.choice([1, 17, 512, 4096, 10_001, 65_536, MIB, 2 * MIB, 3 * MIB + 7])
        nbytes = self.choose.randrange(nbytes) + 1 if self.choose.random() < 0.5 else nbytes
        offset = self.choose.randrange(SHARE - nbytes)
        return (offset // 4096 * 4096 if self.choose.random() < 0.4 else offset), nbytes

    def batch(self, volume):
        """Writes on bytes of their own, all at once; reads of what nobody writes; some tickets dropped."""
        if self.loose:
            # Writes whose tickets were dropped may still be in flight, and the next ones may be on the same bytes.
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
                # From aligned memory, which is used again at once, so this one is waited for.
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
    """Every worker checks what it wrote before and writes anew."""

    def work(worker):
        worker.check(volume)
        for _ in range(30):
            worker.batch(volume)

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(work, workers))


@pytest.mark.soak
def test_random_operations_for_minutes(tmp_path):
    # Large objects in mappings of their own and one heap for all threads: what is freed shows at once.
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
        # In turn: closed, dropped, and closed twice, with writes in flight.
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
        assert resident < after_first[2] + 16 * MIB, "memory leaks"
    print(f"{rounds} rounds, {sum(worker.operations for worker in workers)} writes")
