"""Activations that leave a device leave the fake one."""

from support.fake_device import fake

__all__ = ["fake"]
