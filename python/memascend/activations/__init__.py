"""Offloads checkpointed activations to host memory or storage until the backward needs them."""
