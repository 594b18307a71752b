"""Implements `memascend.offload()` and its results: plans, opens the store, and runs each step in order.

`offload` is the public call; `decide` and `open_store` prepare a run, and `build` makes its parts, bottom up. `session`
orders the actions of a step, and the module hooks notify it of forwards; `run` holds the data of a commit, and the
resources that `close()` releases. `value_edits` changes values outside of a step, `materialize` reads them out, and
`report` measures.

Invariant: the values of a forward, the values on storage and the count `optimizer.steps` belong to one commit. A call
that is rejected leaves model, optimizer and storage as they were.

Never: no code that builds a run runs in a step. The resources of a run refer to neither model nor optimizer, so that
both can be collected. This package does no arithmetic on weights or gradients.
"""
