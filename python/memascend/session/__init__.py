"""Makes `memascend.offload()` and its results: decides, opens the store, and runs each step in order.

`offload` is the call; `decide` and `open_store` prepare a run, and `build` makes its parts, bottom up. `session` has
the order of a step, and is notified of the model's forwards; `run` has the data of a commit, and the resources that
are released at the end. `value_edits` changes values outside of a step, and `materialize` reads them out; `report`
measures.

Invariant: the values of a forward, the values on storage and the count `optimizer.steps` belong to one commit. A call
that is rejected leaves model, optimizer and storage as they were.

Never: no code that builds a run runs in a step. The resources of a run refer to neither model nor optimizer, so that
both can be collected. There is no arithmetic on weights or gradients here.
"""
