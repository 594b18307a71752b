//! Gathers a whole entry's tensors from staging chunks, and scatters them again.

use memascend_store::{Buffer, Shared, Store};

use crate::{
    Result,
    apply::inside,
    bench::{Bench, bytes_mut, clear_from},
    spill::spill_dtype,
};

/// Where tensors begin.
const ALIGN: usize = 64;

/// Where the tensors of an entry lie in one piece of memory: values, state of the entry's shape, gradient.
pub(crate) struct Plan {
    /// Where each begins, and the bytes of an element.
    tensors: Vec<(usize, usize)>,
    elements: usize,
    spilled: bool,
    pub(crate) bytes: usize,
}

impl Plan {
    pub(crate) fn new(store: &Store, entry: usize, spilled: bool) -> Result<Self> {
        let described = &store.description().entries[entry];
        let elements = usize::try_from(described.elements()).unwrap_or(usize::MAX);
        let mut dtypes = vec![described.dtype];
        dtypes.extend(described.chunked().map(|tensor| tensor.dtype));
        if spilled {
            dtypes.push(spill_dtype(store, entry)?);
        }
        let mut bytes: usize = 0;
        let mut tensors = Vec::with_capacity(dtypes.len());
        for dtype in dtypes {
            let element = usize::try_from(dtype.bytes()).unwrap_or(1);
            tensors.push((bytes, element));
            bytes = bytes.saturating_add(elements.saturating_mul(element).next_multiple_of(ALIGN));
        }
        Ok(Self { tensors, elements, spilled, bytes })
    }

    /// Values, state of the entry's shape, gradient.
    pub(crate) fn parts(&self, all: &Shared) -> Result<(Shared, Vec<Shared>, Option<Shared>)> {
        let mut parts = Vec::with_capacity(self.tensors.len());
        for &(at, element) in &self.tensors {
            parts.push(inside(all, at, self.elements * element)?);
        }
        let gradient = if self.spilled { parts.pop() } else { None };
        let values = parts.remove(0);
        Ok((values, parts, gradient))
    }
}

/// The parts of a staging chunk that hold a chunk's tensors, in the order of the plan.
fn staged(bench: &Bench<'_>, entry: usize, chunk: u32, memory: &Shared, plan: &Plan) -> Result<Vec<Shared>> {
    let elements = bench.elements(entry, chunk).len();
    let mut parts = vec![inside(&bench.part(entry, chunk, memory)?, 0, elements * plan.tensors[0].1)?];
    for (_, at, nbytes) in bench.in_chunk(entry, chunk) {
        parts.push(inside(memory, at, nbytes)?);
    }
    if plan.spilled {
        let (part, used) = bench.spill_part(entry, chunk, memory)?;
        parts.push(inside(&part, 0, used)?);
    }
    Ok(parts)
}

/// Copies what was read of a chunk to its place in the whole.
pub(crate) fn gathered(
    bench: &Bench<'_>,
    (entry, chunk): (usize, u32),
    memory: &Shared,
    plan: &Plan,
    all: &Shared,
) -> Result<()> {
    let start = bench.elements(entry, chunk).start;
    for (part, &(at, element)) in staged(bench, entry, chunk, memory, plan)?.iter().zip(&plan.tensors) {
        let place = inside(all, at + start * element, part.len())?;
        // SAFETY: nothing is in flight of this staging chunk, which is this turn's.
        let from = unsafe { bytes_mut(part) };
        // SAFETY: nothing is in flight of the whole, which is this job's and apart from the chunk.
        unsafe { bytes_mut(&place) }.copy_from_slice(from);
    }
    Ok(())
}

/// Copies a chunk of the whole to where it is written from. The gradient stays: it is not written.
pub(crate) fn scattered(
    bench: &Bench<'_>,
    (entry, chunk): (usize, u32),
    memory: &Shared,
    plan: &Plan,
    all: &Shared,
) -> Result<()> {
    let start = bench.elements(entry, chunk).start;
    for piece in bench.pieces_of_chunk(entry, chunk) {
        // SAFETY: nothing is in flight of this staging chunk, which is this turn's.
        unsafe { clear_from(&bench.part(entry, piece, memory)?, 0) };
    }
    let written = plan.tensors.len() - usize::from(plan.spilled);
    let parts = staged(bench, entry, chunk, memory, plan)?;
    for (part, &(at, element)) in parts.iter().zip(&plan.tensors).take(written) {
        let place = inside(all, at + start * element, part.len())?;
        // SAFETY: nothing is in flight of the whole, which is this job's.
        let from = unsafe { bytes_mut(&place) };
        // SAFETY: as for the pieces; the chunk is apart from the whole.
        unsafe { bytes_mut(part) }.copy_from_slice(from);
    }
    Ok(())
}
