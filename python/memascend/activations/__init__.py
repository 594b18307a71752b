"""Keeps what checkpoints save in host memory or on storage until the backward."""
