"""Keeps checkpointed activations in host memory or on storage until the backward needs them.

`activations` recognises and replaces the tensors that a checkpoint saves. `chunks` moves their bytes between the
device, host memory and unlinked files.

Invariant: a restored tensor has the bits of the saved one, or an error is raised; a checksum verifies bytes from
storage. The plan limits the host memory for activations. Once this memory is full, activations go to storage.

Not in this package: other saved tensors. `params.saved_tensors` handles views of units; autograd saves all other
tensors as they are.
"""
