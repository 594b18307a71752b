"""Receives gradients as they appear: used at once, or kept until step() behind handles in `p.grad`."""
