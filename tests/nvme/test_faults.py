"""Tests real faults: full, read-only, shortened, broken, vanished and slow devices."""

import errno
import os
import re
import signal
import subprocess
import threading
import time

import pytest
from support.disks import read

from memascend import StorageError, TimeoutExpired, nvme

MIB = 1 << 20
pytestmark = pytest.mark.root


def failed(call, *errnos):
    """Calls `call`, which must fail with one of the error numbers `errnos`; returns its StorageError."""
    with pytest.raises(StorageError) as caught:
        call()
    assert caught.value.errno in errnos, caught.value
    return caught.value


def room(error, folder):
    """Returns the number of additional bytes that the file needs according to `error`.

    Requires that the error also states the true number of available bytes.
    """
    needed, free = map(int, re.findall(r"for (\d+) more bytes: only (\d+) bytes are available", str(error))[0])
    found = os.statvfs(folder)
    assert 20 * MIB < found.f_bavail * found.f_frsize == free, "the failed open must leave no file behind"
    return needed


def works(volume, offset=0):
    volume.write(b"works" * 100, offset).wait()
    assert read(volume, 500, offset) == b"works" * 100


def test_a_full_file_system_is_found_at_open(small_ext4):
    path = small_ext4 / "volume"
    error = failed(lambda: nvme.open(path, size=200 * MIB), errno.ENOSPC)
    assert error.path == str(path)
    assert room(error, small_ext4) == 200 * MIB
    assert not path.exists()
    with nvme.open(path, size=10 * MIB) as volume:
        works(volume)
    error = failed(lambda: nvme.open(path, size=200 * MIB), errno.ENOSPC)
    assert 189 * MIB <= room(error, small_ext4) <= 190 * MIB, "the file already has 10 MiB"
    assert path.stat().st_size == 10 * MIB, "a failed growth must not change the file's size"
    with nvme.open(path) as volume:
        works(volume, 77)
    failed(lambda: nvme.open([small_ext4 / "one", small_ext4 / "two"], size=100 * MIB), errno.ENOSPC)
    assert not (small_ext4 / "one").exists()
    assert not (small_ext4 / "two").exists()


def test_open_rejects_a_read_only_file_system(small_ext4):
    path = small_ext4 / "volume"
    nvme.open(path, size=MIB).close()
    subprocess.run(["mount", "-o", "remount,ro", small_ext4], check=True)
    error = failed(lambda: nvme.open(path), errno.EROFS)
    assert "read-only" in str(error)
    failed(lambda: nvme.open(small_ext4 / "new", size=MIB), errno.EROFS)


def test_read_only_device_rejects_open_and_writes(loop, backend):
    device = loop(16 * MIB, "--read-only")
    error = failed(lambda: nvme.open(device), errno.EROFS, errno.EACCES)
    assert "read-only" in str(error)
    other = loop(16 * MIB)
    with nvme.open(other, backend=backend) as volume:
        works(volume)
        subprocess.run(["blockdev", "--setro", other], check=True)
        error = failed(volume.write(b"1" * 4096, 8192).wait, errno.EPERM, errno.EROFS, errno.EIO)
        assert (error.path, error.offset, error.nbytes) == (other, 8192, 4096)
        assert read(volume, 5) == b"works", "earlier data must stay readable"


def test_read_past_the_end_of_a_truncated_file_raises(path, backend):
    with nvme.open(path, size=8 * MIB, backend=backend) as volume:
        volume.write(b"a" * (8 * MIB), 0).wait()
        os.truncate(path, 3 * MIB + 100)
        with pytest.raises(StorageError, match="truncated") as caught:
            volume.read(bytearray(2 * MIB), 2 * MIB).wait()
        assert caught.value.path == str(path)
        assert 2 * MIB <= caught.value.offset <= 3 * MIB + 100
        with pytest.raises(StorageError, match="truncated"):
            volume.read(bytearray(100), 7 * MIB).wait()
        works(volume, MIB)


def test_write_past_the_file_size_limit_raises_efbig(path, backend, child):
    with nvme.open(path, size=8 * MIB, backend=backend):
        pass
    assert "EFBIG" in child(
        """
        import errno, resource, signal, sys
        from memascend import StorageError, nvme
        volume = nvme.open(sys.argv[1], backend=sys.argv[2])
        # Sets the limit after the file exists. The default action of SIGXFSZ would end the process.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        assert volume.write(b"1" * 4096, 0).wait() == 4096
        try:
            volume.write(b"1" * (1 << 20), (1 << 20) - 8192).wait()
        except StorageError as error:
            assert error.path == sys.argv[1] and error.offset >= (1 << 20) - 8192, error
            print(errno.errorcode[error.errno])
        volume.flush()
        """,
        path,
        backend,
    )


@pytest.mark.parametrize("kind", ["file", "block device"])
def test_error_of_a_faulty_disk_names_path_offset_and_size(faulty, loop, backend, kind):
    path = faulty.path if kind == "file" else loop(0, over=faulty.path)
    with nvme.open(path, size=16 * MIB, backend=backend) as volume:
        volume.write(b"before" * 1000, 3).wait()
        volume.flush()
        for number in (errno.EIO, errno.ENOSPC, errno.EROFS):
            # A block device turns most error numbers into EIO.
            expected = (number, errno.EIO)
            faulty.set(read={"errno": number})
            error = failed(volume.read(bytearray(4096), MIB).wait, *expected)
            assert (error.path, error.offset, error.nbytes) == (str(path), MIB, 4096)
            faulty.set(write={"errno": number})
            error = failed(volume.write(bytes(4096), 2 * MIB).wait, *expected)
            assert (error.path, error.offset, error.nbytes) == (str(path), 2 * MIB, 4096)
            failed(volume.write(b"unaligned", 5).wait, *expected)
        faulty.set()
        assert read(volume, 6000, 3) == b"before" * 1000
        works(volume, 4 * MIB)


def test_operations_on_a_vanished_device_fail(faulty, backend):
    volume = nvme.open(faulty.path, backend=backend)
    works(volume)
    faulty.set(delay=0.2)
    tickets = [volume.write(b"1" * 4096, index * 4096) for index in range(8)]
    faulty.vanish()
    for ticket in tickets:
        failed(ticket.wait, errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENODEV)
    failed(volume.read(bytearray(100), 0).wait, errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENODEV)
    with pytest.raises(StorageError):
        volume.flush()
    volume.close()


def test_a_timeout_ends_the_wait_and_not_the_operation(faulty, backend):
    with nvme.open(faulty.path, backend=backend) as volume:
        faulty.set(delay=0.5)
        ticket = volume.write(b"slow" * 1000, 0)
        with pytest.raises(TimeoutExpired, match="write of 4000 bytes at offset 0"):
            ticket.wait(timeout=0.05)
        with pytest.raises(TimeoutExpired):
            volume.flush(timeout=0.01)
        assert not ticket.done()
        faulty.set()
        assert ticket.wait() == 4000


def test_ctrl_c_ends_a_wait_and_not_the_operation(faulty, backend):
    with nvme.open(faulty.path, backend=backend) as volume:
        faulty.set(delay=1.0)
        ticket = volume.write(b"slow" * 1024, 0)
        for call in (ticket.wait, volume.flush, volume.close):
            threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                call()
            assert not ticket.done(), time.monotonic() - began
        faulty.set()
        assert ticket.wait() == 4096
    assert volume.closed


def test_volume_works_for_an_unprivileged_user_with_a_memlock_limit(tmp_path, child):
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    backend = child(
        """
        import os, resource, sys
        from memascend import nvme
        os.chdir(sys.argv[1])  # the new user may not be allowed to enter the parent folders
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with nvme.open("volume", size=1 << 24) as volume:
            volume.write(b"1" * (1 << 22), 5).wait()
            into = bytearray(1 << 22)
            volume.read(into, 5).wait()
            assert into == b"1" * (1 << 22)
            volume.flush()
            print(volume.backend, os.getuid())
        """,
        folder,
    )
    assert backend in {"io_uring 65534", "threads 65534"}
