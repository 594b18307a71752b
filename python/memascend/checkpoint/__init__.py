"""Reads weights and checkpoints (safetensors) into stores, and writes weights and checkpoints from stores.

Invariant: a save replaces an earlier checkpoint only by a complete one, and keeps the earlier one if it fails. The
manifest has a checksum of every tensor, and `offload()` verifies all checksums before it uses any value of a
checkpoint. If a tensor in a file does not fit the model, an error names the tensor before a store is written.

All values are read and written in parts, so that a whole model is never in memory. Nothing is unpickled. If the
conversion of a checkpoint's optimizer state loses precision or master weights, a warning names each loss.
"""
