"""Tests opening volumes: raw devices, foreign data, locks, races, forks, killed processes, denied io_uring."""

import errno
import os
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from support.disks import read
from support.forked_child import in_child
from support.stores import filled

from memascend import ConfigError, MemascendError, StorageError, UsageError, engine, nvme

MIB = 1 << 20
root = pytest.mark.root


@root
@pytest.mark.parametrize("sector", [512, 4096])
def test_raw_device_keeps_written_bytes_and_rejects_a_larger_size(loop, backend, sector):
    device = loop(16 * MIB, "--sector-size", sector)
    with nvme.open(device, backend=backend) as volume:
        assert (volume.size, volume.direct, volume.alignment) == (16 * MIB, True, sector)
        assert volume.devices()[0]["kind"] == "raw"
        volume.write(b"raw" * 1000, 16 * MIB - 3000).wait()
        volume.write(b"\x07" * 5000, 4090).wait()
        volume.flush()
    with nvme.open(device) as volume:
        assert read(volume, 3000, 16 * MIB - 3000) == b"raw" * 1000
    with pytest.raises(ConfigError, match="has 16777216 bytes"):
        nvme.open(device, size=17 * MIB)


@root
def test_stripe_of_two_raw_devices_and_a_file_reads_back_its_data(loop, tmp_path):
    paths = [loop(16 * MIB), loop(16 * MIB, "--sector-size", 4096), tmp_path / "file"]
    with nvme.open(paths, size=30 * MIB) as volume:
        assert volume.alignment == 4096
        data = os.urandom(7 * MIB + 11)
        volume.write(data, 12_345).wait()
        assert read(volume, len(data), 12_345) == data


def beginning(device):
    with open(device, "rb") as file:
        return file.read(1 << 17)


@root
@pytest.mark.parametrize("tool", [["mkfs.ext4", "-q"], ["mkswap"]])
def test_a_foreign_device_is_refused_until_wiped(loop, tool):
    """Tests two foreign signatures. Tables in the Rust code list all signatures that memascend recognises."""
    device = loop(64 * MIB)
    subprocess.run([*tool, device], check=True, capture_output=True)
    first = beginning(device)
    with pytest.raises(StorageError, match="not ours") as caught:
        nvme.open(device)
    assert caught.value.path == device
    assert "wipefs" in str(caught.value)
    assert beginning(device) == first, "the rejected open changed the device"
    subprocess.run(["wipefs", "--all", "--quiet", device], check=True)
    nvme.open(device).close()


@root
def test_a_partition_table_is_refused(loop):
    """Tests an MBR partition table, which has no magic bytes of its own: memascend recognises it by its entries."""
    device = loop(64 * MIB)
    entry = bytes([0, 0, 2, 0, 0x83, 255, 255, 255]) + struct.pack("<II", 2048, 4096)
    with open(device, "r+b") as file:
        file.write(bytes(446) + entry + bytes(48) + b"\x55\xaa" + bytes(512))
    with pytest.raises(StorageError, match="partition table"):
        nvme.open(device)


@root
def test_a_mounted_device_is_refused(small_ext4):
    device = subprocess.run(["findmnt", "-no", "SOURCE", small_ext4], capture_output=True, text=True, check=True).stdout
    with pytest.raises(StorageError, match=f"mounted at {small_ext4}") as caught:
        nvme.open(device.strip())
    assert caught.value.errno == errno.EBUSY


@root
def test_an_open_device_cannot_be_formatted_or_opened_again(loop):
    device = loop(64 * MIB)
    with nvme.open(device):
        with pytest.raises(StorageError, match=f"this process \\(pid {os.getpid()}\\)"):
            nvme.open(device)
        assert subprocess.run(["mkfs.ext4", "-q", device], capture_output=True, check=False).returncode != 0
    subprocess.run(["mkfs.ext4", "-q", device], check=True)


def holding(path, then="time.sleep(100)"):
    begin = (
        "import sys, time\nfrom memascend import nvme\nv = nvme.open(sys.argv[1], size=1 << 24)\nprint(1, flush=True)"
    )
    code = f"{begin}\n{then}"
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"1\n"
    return process


@pytest.mark.parametrize("kind", ["file", pytest.param("raw", marks=root)])
def test_two_processes_cannot_open_one_device(path, request, kind):
    device = path if kind == "file" else request.getfixturevalue("loop")(16 * MIB)
    with holding(device) as other:
        try:
            with pytest.raises(StorageError, match=f"in use by pid {other.pid}") as caught:
                nvme.open(device)
            assert caught.value.errno == errno.EBUSY
        finally:
            other.kill()
    nvme.open(device, size=16 * MIB).close()


def test_forked_child_cannot_use_the_volume_and_parent_writes_complete(path, backend):
    volume = nvme.open(path, size=64 * MIB, backend=backend)
    tickets = [volume.write(bytes([index]) * (4 * MIB), index * 4 * MIB + 1) for index in range(15)]

    def use():
        nonlocal volume, tickets
        for call in (
            lambda: volume.write(b"1", 0),
            lambda: volume.read(bytearray(1), 0),
            volume.flush,
            volume.close,
            tickets[-1].wait,
        ):
            with pytest.raises(UsageError, match="fork"):
                call()
        assert volume.closed
        with nvme.open(f"{path}-child", size=MIB) as own:
            own.write(b"child", 3).wait()
        volume = tickets = None

    assert in_child(use) == "None"
    assert [ticket.wait() for ticket in tickets] == [4 * MIB] * 15
    volume.close()
    with nvme.open(path) as volume:
        for index in range(15):
            assert read(volume, 4 * MIB, index * 4 * MIB + 1) == bytes([index]) * (4 * MIB)


def test_a_child_that_outlives_its_parent_does_not_keep_the_lock(path):
    with holding(
        path, "import os; pid = os.fork(); pid or time.sleep(100); print(pid, flush=True); time.sleep(100)"
    ) as other:
        orphan = int(other.stdout.readline())
        try:
            other.kill()
            other.wait()
            nvme.open(path).close()
        finally:
            os.kill(orphan, 9)


DENIED = """
    import ctypes, struct, sys
    from memascend import ConfigError, nvme
    # Installs a seccomp filter, as container runtimes do: io_uring_setup fails with the error number `answer`.
    number, answer = 425, int(sys.argv[2])
    program = b"".join(
        struct.pack("HBBI", *step)
        for step in [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | answer), (0x06, 0, 0, 0x7FFF0000)]
    )
    class Program(ctypes.Structure):
        _fields_ = [("steps", ctypes.c_ushort), ("at", ctypes.c_char_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Program(4, program))) == 0
    with nvme.open(sys.argv[1], size=1 << 20) as volume:
        volume.write(b"1" * 9999, 5).wait()
        into = bytearray(9999)
        volume.read(into, 5).wait()
        assert into == b"1" * 9999
        print(volume.backend, volume.why_not)
    try:
        nvme.open(sys.argv[1], backend="io_uring")
    except ConfigError as error:
        print(error)
"""


@pytest.mark.parametrize(("number", "says"), [(errno.EPERM, "seccomp"), (errno.ENOSYS, "kernel has none")])
def test_denied_io_uring_falls_back_to_the_threads_backend(path, child, number, says):
    chosen, refused = child(DENIED, path, number).splitlines()
    assert chosen.startswith("threads ")
    assert says in chosen
    assert 'backend "io_uring" is not available' in refused


def test_open_without_free_descriptors_fails_and_open_volumes_work(path, child):
    output = child(
        """
        import os, resource, sys
        from memascend import MemascendError, nvme
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        held = [os.open("/dev/null", os.O_RDONLY)]
        volumes = []
        try:
            while True:
                volumes.append(nvme.open(f"{sys.argv[1]}-{len(volumes)}", size=4096))
        except MemascendError as error:
            print(error)
        for index, volume in enumerate(volumes):
            volume.write(b"works", 0).wait()
        print({volume.backend for volume in volumes} <= {"io_uring", "threads"}, len(volumes) > 3)
        """,
        path,
    )
    assert "too many open files" in output
    assert output.endswith("True True")


SIZE = 1 << 16


def at_once(count, act):
    """Calls `act(index)` on `count` threads that start together; returns each thread's result or MemascendError."""
    gate = threading.Barrier(count)

    def run(index):
        gate.wait()
        try:
            return act(index)
        except MemascendError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_only_one_of_several_threads_opens_a_new_path_and_keeps_its_file(tmp_path, backend):
    for turn in range(12):
        path = tmp_path / f"volume{turn}"
        results = at_once(8, lambda _, path=path: nvme.open(path, size=SIZE, backend=backend))
        won = [volume for volume in results if isinstance(volume, nvme.Volume)]
        assert len(won) == 1, results
        assert all(isinstance(result, StorageError) for result in results if result is not won[0]), results
        with won[0] as volume:
            volume.write(bytes([turn + 1]) * SIZE, 0).wait()
        assert path.stat().st_size == SIZE, "a thread that lost changed the length of the winner's file"
        assert path.read_bytes() == bytes([turn + 1]) * SIZE


def test_racing_opens_of_two_paths_remove_no_file_of_the_winner(tmp_path):
    for turn in range(12):
        paths = [tmp_path / f"{turn}.{index}" for index in range(2)]
        orders = [paths, paths[::-1]]
        results = at_once(6, lambda index, orders=orders: nvme.open(orders[index % 2], size=2 << 20))
        with ExitStack() as closing:
            won = [closing.enter_context(volume) for volume in results if isinstance(volume, nvme.Volume)]
            assert len(won) <= 1, results
            if won:
                assert all(path.exists() for path in paths)
            # A thread may create a file and then lose the race to lock the file. It leaves the empty file to the thread
            # that won.
            assert won or all(not path.exists() or path.stat().st_size == 0 for path in paths)
            assert not won or all(path.stat().st_size == 1 << 20 for path in paths)


def records():
    return [engine.Record(name="weight", values=torch.full((64,), 7.0), state={})]


@pytest.mark.parametrize("existing", ["refuse", "resume"])
@pytest.mark.parametrize("place", ["file", "folder/"])
def test_only_one_of_several_threads_creates_a_new_store(tmp_path, existing, place):
    for turn in range(12):
        path = f"{tmp_path}/{turn}{place}"

        def train(_, path=path):
            with filled(path, records(), existing=existing) as store, engine.Engine(store) as updates:
                made, step = store.created, store.step + 1
                updates.fill("weight", torch.full((64,), 8.0), step=step)
                updates.commit(step)
                return made

        results = at_once(6, train)
        assert results.count(True) == 1, results
        assert existing == "resume" or results.count(False) == 0, results
        with engine.Store.open(path) as store:
            # Each thread that opened the store committed one step.
            assert store.step == results.count(True) + results.count(False)
            assert torch.equal(store.read("weight")[0], torch.full((64,), 8.0))


def test_store_is_intact_after_threads_race_to_replace_and_resume_it(tmp_path):
    for turn in range(12):
        path = tmp_path / f"store{turn}"
        filled(path, records()).close()

        def act(index, path=path):
            existing = "replace" if index % 2 else "resume"
            with filled(path, records(), existing=existing) as store, engine.Engine(store) as updates:
                updates.fill("weight", torch.full((64,), float(index)), step=store.step + 1)
                updates.commit(store.step + 1)
                return index

        results = at_once(6, act)
        assert any(isinstance(result, int) for result in results), results
        assert not any(isinstance(result, ConfigError) for result in results), results
        with engine.Store.open(path) as store:
            store.verify()
            assert store.read("weight")[0][0].item() in [result for result in results if isinstance(result, int)]
