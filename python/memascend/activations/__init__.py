"""Checkpointed activations, kept in host memory or on storage until the backward needs them.

`activations` recognises and replaces the tensors that a checkpoint saves; `chunks` moves chunks of them between the
device, host memory and unlinked files.

Invariant: a restored tensor has the bits of the saved one, by a checksum if it lay on storage, or an error is raised.
A chunk is free, held (its content is not on storage), or loose: its content is on storage, being written, or of no use
any more. Memory is planned; where there is none, more goes to storage.

Never here: other saved tensors. Views of units are handled by `params.saved_tensors`, all others stay as they are.
"""
