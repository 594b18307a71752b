"""Implements `memascend.offload()`: plans a run, opens its store, and runs the steps of the training loop.

`offload` is the public call; `decide` and `open_store` prepare a run, and `build` makes the parts of the run, bottom
up. `session` orders the actions of a step, and module hooks notify `session` of forwards. `run` holds the
metadata of a commit, and the resources that `close()` releases. `value_edits` commits changes of values outside of a
step. `materialize` provides all values inside a `with` block, and writes checkpoints. `report` measures.

Invariant: the values of a forward, the values on storage and the count `optimizer.steps` belong to one commit. A call
that is rejected leaves model, optimizer and storage as they were, except that a model that `offload()` sharded stays
sharded.

A step never executes code that builds a run. The resources of a run never refer to the model or the optimizer, so that
Python can collect the model and the optimizer. This package does no arithmetic on weights or gradients.
"""
