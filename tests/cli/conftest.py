"""Gives command tests access to disks, and the config of a small model."""

from support.disks import backend, child, faulty, loop, path, small_ext4
from support.planned import config

__all__ = ["backend", "child", "config", "faulty", "loop", "path", "small_ext4"]
