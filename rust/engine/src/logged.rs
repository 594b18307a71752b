//! Applies gradients of the log by the kernels that would have applied them in their step.

use memascend_math::{Rule, scale};
use memascend_store::{Dtype, Shared, Store};

use crate::{
    Error, Result,
    reduced::is_reduced,
    rule::{self, Taken},
    turn::Turn,
    update::{has_adam, has_sgd, single, stepped},
    workbench::{Workbench, floats, floats_mut, paged},
};

/// Bytes of a chunk of a gradient in the log: whole pages.
pub(crate) fn chunk_bytes(bench: &Workbench<'_>, turn: &Turn, dtype: Dtype) -> usize {
    paged(bench.elements(turn.record, turn.index).len(), dtype).1
}

/// What a rule of the log says for a record, which has the state for it.
pub(crate) fn fitting(store: &Store, record: usize, rule: &memascend_store::LoggedRule) -> Result<(Taken, Vec<f32>)> {
    let (taken, factors) = rule::taken(rule)?;
    let described = &store.description().records[record];
    let fits = match taken {
        Taken::Single(_) => has_adam(described) && !is_reduced(described),
        Taken::Reduced(Rule::Adam(_)) => has_adam(described) && is_reduced(described),
        Taken::Reduced(Rule::Momentum(_)) => described.has_momentum() && is_reduced(described),
        Taken::Momentum(numbers) => has_sgd(described) && (numbers.momentum == 0.0 || described.has_momentum()),
    };
    if fits {
        return Ok((taken, factors));
    }
    let (name, rule) = (&described.name, &rule.name);
    Err(Error::Invalid(format!("the store's log has gradients for {name:?} by {rule:?}, for which it has no state")))
}

/// Applies a chunk of a gradient, which is the callee's.
pub(crate) fn applied(
    bench: &Workbench<'_>,
    turn: &Turn,
    (rule, factors): &(Taken, Vec<f32>),
    (gradient, dtype): (&Shared, Dtype),
) -> Result<()> {
    let elements = bench.elements(turn.record, turn.index).len();
    for &factor in factors {
        // SAFETY: it was read, and is this turn's.
        scale(unsafe { floats_mut(gradient, dtype, elements) }, factor, bench.exec);
    }
    let gradient = floats(gradient, dtype, 0, elements);
    match rule {
        Taken::Single(scalars) => single(bench, turn, gradient, scalars),
        Taken::Reduced(rule) => stepped(bench, turn, gradient, rule),
        Taken::Momentum(numbers) => stepped(bench, turn, gradient, &(*numbers).into()),
    }
}

/// Has a store apply what its log holds where somebody only looks.
pub fn apply_logs(store: &Store) {
    store.apply_with(|store, logged| {
        let apply = || {
            let bench = Workbench::on_chunk(store, logged.values.clone(), logged.state.clone())?;
            let turn = Turn { record: logged.record, index: logged.chunk, memory: logged.gradient.clone() };
            let rule = fitting(store, logged.record, logged.rule)?;
            applied(&bench, &turn, &rule, (&logged.gradient, logged.dtype))
        };
        apply().map_err(|error| error.to_string())
    });
}
