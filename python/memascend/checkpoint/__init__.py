"""Reads and writes weights and checkpoints; gives a new store its first values."""
