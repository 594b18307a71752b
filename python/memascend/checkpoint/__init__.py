"""Reads weights and checkpoints (safetensors) into stores, and writes them from stores, on one or several ranks.

Invariant: a checkpoint's folder holds either the earlier checkpoint or the new one, complete, at every moment. The
manifest has a checksum of every tensor, and `offload()` verifies all of them before it uses any value. Tensors that do
not fit the model are rejected with an error that names them, before a store is written.

Values pass through in parts: neither reading nor writing holds a whole model in memory. Nothing is unpickled. If a
conversion loses precision or state, a warning names each loss.
"""
