//! Updates an entry whose state is that of torch's SGD as it is: float32 values or a master, and a momentum or none.

use memascend_math::{Floats, FloatsMut, Moments, Position, Reduced, Rule, Weights, update};
use memascend_store::{Dtype, Entry, Format};

use crate::{
    Error, Result,
    bench::{Bench, clear_from, elements_mut, floats_mut},
    job::Turn,
};

/// Whether an entry has this state, all of it float32 and of its shape.
pub(crate) fn has_state(described: &Entry) -> bool {
    let masters = match described.dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 | Dtype::F16 => 1,
        _ => return false,
    };
    let own = |tensor: &memascend_store::StateTensor| tensor.dtype == Dtype::F32 && tensor.shape == described.shape;
    let moments = usize::from(described.has_momentum());
    described.format == Format::Plain
        && described.state.len() == masters + moments
        && described.state.iter().all(own)
        && described.state.iter().take(masters).all(|tensor| tensor.name == "master")
}

/// The arithmetic on one chunk, whose values are there already where it starts from them.
pub(crate) fn stepped(bench: &Bench<'_>, turn: &Turn, gradient: Floats<'_>, rule: &Rule) -> Result<()> {
    let &Turn { entry, index: chunk, ref memory } = turn;
    let described = &bench.store.description().entries[entry];
    let (dtype, elements) = (described.dtype, bench.elements(entry, chunk).len());
    let values = bench.part(entry, chunk, memory)?;
    let state = bench.state_piece(entry, chunk).map(|piece| bench.part(entry, piece, memory)).transpose()?;
    let mut starts = bench.in_chunk(entry, chunk).map(|(_, start, _)| start);
    let mut next = || {
        let place = state.as_ref().zip(starts.next());
        let (state, start) = place.ok_or_else(|| Error::Invalid("an entry without the state of SGD".into()))?;
        // SAFETY: the tensors of a chunk lie side by side in its piece, aligned to 64 bytes; nothing else uses the
        // chunk between the end of its reads and the beginning of its writes.
        Ok::<_, Error>(unsafe { elements_mut::<f32>(state, start, elements) })
    };
    // SAFETY: as above; what fills the last page of the values is written as zeros.
    unsafe { clear_from(&values, elements * usize::try_from(dtype.bytes()).unwrap_or(1)) };
    // SAFETY: as above.
    let weights = match unsafe { floats_mut(&values, dtype, elements) } {
        FloatsMut::F32(values) => Weights::Single(values),
        values => Weights::Master { master: next()?, values },
    };
    let moments = if described.has_momentum() { Moments::Single(next()?, None) } else { Moments::Nothing };
    Ok(update(Reduced { weights, moments }, gradient, rule, Position::default(), bench.exec)?)
}
