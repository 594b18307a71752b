"""Gives tests of volumes disks of all kinds."""

from support.disks import backend, child, faulty, loop, path, small_ext4

__all__ = ["backend", "child", "faulty", "loop", "path", "small_ext4"]
