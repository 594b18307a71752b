"""Keeps checkpointed activations in host memory or on storage until the backward needs them.

`activations` recognises and replaces the tensors that a checkpoint saves. `chunks` moves their bytes between the
device, host memory and unlinked files.

Invariant: a restored tensor has the bits of the saved tensor, or an error is raised; a checksum verifies bytes from
storage. The plan limits the host memory for activations. Activations that do not fit in this memory are on storage.

Not in this package: all other saved tensors, which `params.saved_tensors` handles.
"""
