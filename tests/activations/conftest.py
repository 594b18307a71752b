"""Provides the fake device for activations that leave a device."""

from support.fake_device import fake

__all__ = ["fake"]
