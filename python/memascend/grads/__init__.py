"""Receives gradients in the backward: uses them at once, or holds them until step() behind handles in `p.grad`."""
