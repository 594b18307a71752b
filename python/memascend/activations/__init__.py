"""Checkpointed activations, which wait in host memory or on storage until the backward needs them.

`activations` recognises what a checkpoint saves and stands for it; `chunks` moves chunks of it between the device, host
memory and unlinked files.

Invariant: what comes back has the bits of what was saved, by a checksum where it lay on storage, or an error is raised.
A chunk is free, held with what is not on storage, or loose: its content is on storage, on its way there, or of no use
any more. Memory is planned; where there is none, more goes to storage.

Never here: other saved tensors: those of units are `params.residency`'s, all others stay as they are.
"""
