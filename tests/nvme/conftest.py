"""Provides fixtures for tests of volumes: paths, backends, devices, file systems, and child processes."""

from support.disks import backend, child, faulty, loop, path, small_ext4

__all__ = ["backend", "child", "faulty", "loop", "path", "small_ext4"]
