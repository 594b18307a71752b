"""Provides fixtures for tests of volumes: files, loop devices, small file systems and faulty disks."""

from support.disks import backend, child, faulty, loop, path, small_ext4

__all__ = ["backend", "child", "faulty", "loop", "path", "small_ext4"]
