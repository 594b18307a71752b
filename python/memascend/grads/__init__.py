"""Gradients from their arrival to the update: used as they appear, or kept on storage or in memory until step().

`gradients` takes each gradient as autograd has accumulated it, and carries out step() and zero_grad() for all of them.
`gradient` has the state of one and begins its update, `lazy_grad` stands in `p.grad` for it, with `operations` that
were recorded. `norms` measures, `loss_scale` scales. `loop` follows the training loop, `microbatches` and `baton`
compute by layer.

Invariant: a gradient is in one `GradientState`, and each change is one of its moves. `p.grad` decides: a
gradient that was removed there is dropped, one that was assigned is used. Nothing is summed, scaled or rounded in
another order than torch's; a read, a norm or a change that would come too late raises.

Never here: commits, which are the session's; reads of weights, which are `params`'s.
"""
