"""Serves a FUSE file system with one file, `disk`. Requests to `disk` fail on command, so the kernel sees real faults.

`python faulty_fuse.py MOUNTPOINT BYTES CONTROL` serves the file system until it is unmounted, or the process is killed.
On SIGTERM, and when its parent process ends, the process unmounts the file system and exits. CONTROL is a JSON file of
faults. The process reads CONTROL before it answers a read, write or fsync. An example of CONTROL, with "delay" in
seconds: {"read": {"errno": 5}, "write": {"errno": 5}, "fsync": {"errno": 5}, "delay": 0.5}.
"""

import ctypes
import errno
import json
import os
import signal
import stat
import struct
import sys
import time
from pathlib import Path

HEADER = struct.Struct("<IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
REPLY = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE = 1, 2, 3, 4, 14, 15, 16
STATFS, RELEASE, FSYNC, FLUSH, INIT, OPENDIR, RELEASEDIR, ACCESS = 17, 18, 20, 25, 26, 27, 29, 34
INTERRUPT, BATCH_FORGET, FALLOCATE = 36, 42, 43
ROOT, DISK = 1, 2
WRITE_BYTES_MAX = 128 << 10
DIRECT_IO = 1
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1

# For some opcodes: the reply to every request with this opcode.
FIXED = {
    OPEN: struct.pack("<QII", 0, DIRECT_IO, 0),
    OPENDIR: struct.pack("<QII", 0, 0, 0),
    STATFS: struct.pack("<QQQQQIIII24x", 1 << 20, 1 << 19, 1 << 19, 10, 10, 4096, 255, 4096, 0),
    **dict.fromkeys((RELEASE, RELEASEDIR, FLUSH, ACCESS, FALLOCATE), b""),
}


class Faulty:
    def __init__(self, mountpoint: str, nbytes: int, control: str) -> None:
        self.disk = bytearray(nbytes)
        self.control = Path(control)
        self.device = os.open("/dev/fuse", os.O_RDWR)
        libc = ctypes.CDLL(None, use_errno=True)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(libc.umount2(mountpoint.encode(), MNT_DETACH)))
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        options = f"fd={self.device},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"faulty", mountpoint.encode(), b"fuse", 6, options) != 0:
            raise OSError(ctypes.get_errno(), "mount")

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.device, WRITE_BYTES_MAX + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in {errno.EINTR, errno.ENOENT}:
                    continue
                raise
            _, opcode, unique, node, *_ = HEADER.unpack_from(request)
            if opcode in {FORGET, BATCH_FORGET, INTERRUPT}:
                continue
            try:
                body, error = self.answer(opcode, node, request[HEADER.size :]), 0
            except OSError as failed:
                body, error = b"", failed.errno or errno.EIO
            try:
                os.write(self.device, REPLY.pack(REPLY.size + len(body), -error, unique) + body)
            except OSError as failed:
                # ENOENT: the calling process was interrupted, so the kernel no longer waits for this reply.
                if failed.errno != errno.ENOENT:
                    raise

    def attributes(self, node: int) -> bytes:
        mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o600
        size = 0 if node == ROOT else len(self.disk)
        return ATTRIBUTES.pack(node, size, (size + 511) // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        if opcode == INIT:
            flags = 1 << 5  # allows writes larger than a page
            return struct.pack(
                "<IIIIHHIIHHI28x", 7, 31, 65536, flags, 12, 9, WRITE_BYTES_MAX, 1, WRITE_BYTES_MAX >> 12, 0, 0
            )
        if opcode == LOOKUP:
            if body.rstrip(b"\0") != b"disk":
                raise OSError(errno.ENOENT, "")
            return struct.pack("<QQQQII", DISK, 0, 0, 0, 0, 0) + self.attributes(DISK)
        if opcode in {GETATTR, SETATTR}:
            return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
        fixed = FIXED.get(opcode)
        return self.data(opcode, body) if fixed is None else fixed

    def data(self, opcode: int, body: bytes) -> bytes:
        """Answers a read, write or fsync, or fails with the error that CONTROL sets for it. Rejects other requests."""
        faults = json.loads(self.control.read_text())
        time.sleep(faults.get("delay", 0))
        if opcode == READ:
            _, offset, nbytes = struct.unpack_from("<QQI", body)
            self.fail(faults.get("read"))
            return bytes(self.disk[offset : offset + nbytes])
        if opcode == WRITE:
            _, offset, nbytes = struct.unpack_from("<QQI", body)
            self.fail(faults.get("write"))
            self.disk[offset : offset + nbytes] = body[40 : 40 + nbytes]
            return struct.pack("<II", nbytes, 0)
        if opcode == FSYNC:
            self.fail(faults.get("fsync"))
            return b""
        raise OSError(errno.ENOSYS, "")

    @staticmethod
    def fail(fault: "dict[str, int] | None") -> None:
        if fault:
            raise OSError(fault["errno"], "")


if __name__ == "__main__":
    faulty = Faulty(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    print("mounted", flush=True)
    faulty.serve()
