//! Updates a compact record with Adam: joins, updates and splits the master weights in one pass.

use memascend_math::{Bf16, CompactState, Floats, Scalars, adam_compact};

use crate::{
    Error, Result,
    turn::Turn,
    workbench::{Workbench, clear_from, elements_mut},
};

/// Updates one chunk in place. Its values are in the chunk already: read from storage, or copied by `Live::take`.
pub(crate) fn stepped(bench: &Workbench<'_>, turn: &Turn, gradient: Floats<'_>, scalars: &Scalars) -> Result<()> {
    let &Turn { record, index: chunk, ref memory } = turn;
    let elements = bench.elements(record, chunk).len();
    let state = bench.part(record, bench.chunks_of(record) + chunk, memory)?;
    let values = bench.part(record, chunk, memory)?;
    let mut starts = bench.in_chunk(record, chunk).map(|(_, start, _)| start);
    let mut next = || starts.next().ok_or_else(|| Error::Invalid("a record without a compact state".into()));
    // SAFETY: the tensors of a chunk are disjoint in its extent and aligned to 64 bytes; see [Note: a turn owns its
    // staging chunk].
    let rest = unsafe { elements_mut::<u16>(&state, next()?, elements) };
    // SAFETY: as for `rest`; `exp_avg` is the next tensor of the extent.
    let exp_avg = unsafe { elements_mut::<f32>(&state, next()?, elements) };
    // SAFETY: as for `rest`; `exp_avg_sq` is the next tensor of the extent.
    let exp_avg_sq = unsafe { elements_mut::<f32>(&state, next()?, elements) };
    // SAFETY: the turn owns the part for values, too. The rest of its last page is stored as zeros.
    unsafe { clear_from(&values, elements * size_of::<Bf16>()) };
    // SAFETY: as above; the slice of `clear_from` is gone.
    let values = unsafe { elements_mut::<Bf16>(&values, 0, elements) };
    let state = CompactState { values, rest, exp_avg, exp_avg_sq };
    Ok(adam_compact(state, gradient, scalars, bench.exec)?)
}
