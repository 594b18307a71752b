"""Copies units and gradients to and from the device that computes, in the order of its streams."""
