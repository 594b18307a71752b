//! Applies gradients by rules of the gradient log, with the same kernels that apply gradients in a step.

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

/// Returns how many bytes of a logged gradient belong to the chunk of the turn, rounded up to whole pages.
pub(crate) fn chunk_bytes(bench: &Workbench<'_>, turn: &Turn, dtype: Dtype) -> usize {
    paged(bench.elements(turn.record, turn.index).len(), dtype).1
}

/// Decodes a rule of the log and its factors. Returns an error if [`rule::taken`] cannot decode the rule, or if the
/// record does not have the state that the rule needs.
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
    Err(Error::Invalid(format!(
        "the store's log has gradients of {name:?} for the rule {rule:?}, but {name:?} does not have the state that \
         this rule needs: open the store with the version of memascend that wrote it"
    )))
}

/// Updates the chunk of a turn with `gradient`, by a rule of the log. First multiplies `gradient` by each factor, in
/// place.
pub(crate) fn applied(
    bench: &Workbench<'_>,
    turn: &Turn,
    (rule, factors): &(Taken, Vec<f32>),
    (gradient, dtype): (&Shared, Dtype),
) -> Result<()> {
    let elements = bench.elements(turn.record, turn.index).len();
    for &factor in factors {
        // SAFETY: the read of the gradient has ended, and its memory belongs to this turn.
        scale(unsafe { floats_mut(gradient, dtype, elements) }, factor, bench.exec);
    }
    let gradient = floats(gradient, dtype, 0, elements);
    match rule {
        Taken::Single(scalars) => single(bench, turn, gradient, scalars),
        Taken::Reduced(rule) => stepped(bench, turn, gradient, rule),
        Taken::Momentum(numbers) => stepped(bench, turn, gradient, &(*numbers).into()),
    }
}

/// Registers the engine's kernels with a store. The store calls these kernels when it rebuilds the newest state of a
/// record from a slot and the log. It does so, for example, for a caller that reads the store before the log is
/// replayed.
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
