//! Updates a record in the compact format with Adam. One pass joins the two halves of each master weight, updates the
//! weight, and splits the weight again.

use memascend_math::{Bf16, CompactState, Floats, Scalars, adam_compact};

use crate::{
    Error, Result,
    turn::Turn,
    workbench::{Workbench, clear_from, elements_mut},
};

/// Updates one chunk in place. The chunk's values are in memory already: a read has loaded the values from storage,
/// `Live::take` has copied the values, the record is in the RAM tier, or the caller of `Workbench::on_chunk` has given
/// memory with the values.
pub(crate) fn stepped(bench: &Workbench<'_>, turn: &Turn, gradient: Floats<'_>, scalars: &Scalars) -> Result<()> {
    let &Turn { record, index: chunk, ref memory } = turn;
    let elements = bench.elements(record, chunk).len();
    let state = bench.part(record, bench.chunks_of(record) + chunk, memory)?;
    let values = bench.part(record, chunk, memory)?;
    let mut starts = bench.in_chunk(record, chunk).map(|(_, start, _)| start);
    let mut next = || starts.next().ok_or_else(|| Error::Invalid("report this bug: a compact state is missing".into()));
    // SAFETY: the tensors of a chunk are disjoint in its extent and aligned to 64 bytes; see [Note: a turn owns its
    // staging chunk].
    let rest = unsafe { elements_mut::<u16>(&state, next()?, elements) };
    // SAFETY: the turn owns the extent. `exp_avg` is the tensor after `rest`, and disjoint from it.
    let exp_avg = unsafe { elements_mut::<f32>(&state, next()?, elements) };
    // SAFETY: the turn owns the extent. `exp_avg_sq` is the tensor after `exp_avg`, and disjoint from `rest` and
    // `exp_avg`.
    let exp_avg_sq = unsafe { elements_mut::<f32>(&state, next()?, elements) };
    // SAFETY: the turn also owns the part that holds the values. The unused rest of the last page of this part is
    // stored as zeros.
    unsafe { clear_from(&values, elements * size_of::<Bf16>()) };
    // SAFETY: the turn owns the part that holds the values, and `clear_from` no longer uses the part.
    let values = unsafe { elements_mut::<Bf16>(&values, 0, elements) };
    let state = CompactState { values, rest, exp_avg, exp_avg_sq };
    Ok(adam_compact(state, gradient, scalars, bench.exec)?)
}
