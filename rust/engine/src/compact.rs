//! Updates a compact record with Adam: joins, updates and splits the master in one pass.

use memascend_math::{Bf16, CompactState, Floats, Scalars, adam_compact};

use crate::{
    Error, Result,
    turn::Turn,
    workbench::{Workbench, clear_from, elements_mut},
};

/// The arithmetic on one chunk, whose values are there already: read, or taken from where they are resident.
pub(crate) fn stepped(bench: &Workbench<'_>, turn: &Turn, gradient: Floats<'_>, scalars: &Scalars) -> Result<()> {
    let &Turn { record, index: chunk, ref memory } = turn;
    let elements = bench.elements(record, chunk).len();
    let state = bench.part(record, bench.chunks_of(record) + chunk, memory)?;
    let values = bench.part(record, chunk, memory)?;
    let mut starts = bench.in_chunk(record, chunk).map(|(_, start, _)| start);
    let mut next = || starts.next().ok_or_else(|| Error::Invalid("a record without a compact state".into()));
    // SAFETY: the tensors of a chunk lie side by side in its extent, aligned to 64 bytes; nothing else uses the chunk
    // between the end of its reads and the beginning of its writes.
    let rest = unsafe { elements_mut::<u16>(&state, next()?, elements) };
    // SAFETY: as above.
    let exp_avg = unsafe { elements_mut::<f32>(&state, next()?, elements) };
    // SAFETY: as above.
    let exp_avg_sq = unsafe { elements_mut::<f32>(&state, next()?, elements) };
    // SAFETY: as above, in the part for values; what fills its last page is written as zeros.
    unsafe { clear_from(&values, elements * size_of::<Bf16>()) };
    // SAFETY: as above.
    let values = unsafe { elements_mut::<Bf16>(&values, 0, elements) };
    let state = CompactState { values, rest, exp_avg, exp_avg_sq };
    Ok(adam_compact(state, gradient, scalars, bench.exec)?)
}
