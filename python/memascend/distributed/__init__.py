"""Offloads models that torch's `fully_shard` shards. Each rank has its own store, with its rows of each parameter.

[Note: All ranks or none] All ranks must make the same calls in the same order. They make each commit together. A resume
opens all stores at one commit, so ranks never train from rows of different commits. Unless `existing` is "replace",
ranks do not begin a new run while a rank has a store in which a run has made a step.

If a rank fails, dies or hangs, all other ranks raise an error, which names that rank if it is known. If the rank itself
reported an error in `step()` before any rank wrote the root of the commit, all ranks can discard the step and continue.
After the loss of a rank, or an error in a forward or a backward, no rank commits again.

With `reduction="ordered"`, results do not depend on the number of ranks; docs/gpus.md has the exceptions.

Only `fsdp` uses private fields of FSDP2.
"""
