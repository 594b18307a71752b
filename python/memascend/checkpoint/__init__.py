"""Reads weights and checkpoints (safetensors) into stores, and writes weights and checkpoints from stores.

Invariant: at every moment, a checkpoint's folder has one complete checkpoint, either the earlier or the new one. The
manifest has a checksum of every tensor, and `offload()` verifies all checksums before it uses any value. If a tensor
does not fit the model, an error names the tensor before a store is written.

All values are read and written in parts, so that a whole model is never in memory. Nothing is unpickled. If a
conversion loses precision or state, a warning names each loss.
"""
