"""Provides disks of all kinds for tests of volumes."""

from support.disks import backend, child, faulty, loop, path, small_ext4

__all__ = ["backend", "child", "faulty", "loop", "path", "small_ext4"]
