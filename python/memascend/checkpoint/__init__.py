"""Weights and checkpoints: safetensors in and out of stores, whole or of several ranks, and first values.

Invariant: a checkpoint's folder holds an earlier checkpoint whole or the new one whole, at every moment; its manifest
has a checksum of every tensor, and all is verified before anything of it is believed. What does not fit the model is
refused by name, before a store is written.

Values pass through in parts: neither reading nor writing holds a model in memory. Nothing is unpickled, and values are
never converted in silence: what a conversion loses is warned of.
"""
