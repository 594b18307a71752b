//! Copies the tensors of a whole record from staging chunks to one piece of memory, and back.

use memascend_math::{WideState, decode, encode};
use memascend_store::{Buffer, Dtype, Master, Record, Shared, Store};

use crate::{
    Error, Result, reduced,
    spill::spill_dtype,
    turn::Turn,
    workbench::{Workbench, bytes_mut, clear_from, elements_mut, inside},
};

/// The alignment of each tensor in the piece of memory, in bytes.
const ALIGN: usize = 64;

/// The layout of the tensors of a record in one piece of memory, called "the whole". The values come first, then the
/// state tensors of the shape of the record, then the gradient.
///
/// Widened state consists of the float32 tensors of [`WideState`]: master weights if the values have 16 bits, and one
/// moment or two.
pub(crate) struct Plan {
    /// The offset of each tensor in bytes, and the size of an element of this tensor in bytes.
    tensors: Vec<(usize, usize)>,
    elements: usize,
    spilled: bool,
    wide: bool,
    pub(crate) bytes: usize,
}

/// True if the widened state has master weights in addition to the values.
fn has_master(described: &Record) -> bool {
    described.dtype != Dtype::F32
}

impl Plan {
    pub(crate) fn new(store: &Store, record: usize, spilled: bool, wide: bool) -> Result<Self> {
        let described = &store.description().records[record];
        if wide && (!reduced::is_reduced(described) || described.format.master() == Master::None) {
            let (name, format) = (&described.name, described.format.name());
            return Err(Error::Invalid(format!(
                "the engine cannot widen the state of {name:?} in the format {format:?}: use FunctionInput::InChunks \
                 or FunctionInput::Whole"
            )));
        }
        let elements = described.elements() as usize;
        let mut dtypes = vec![described.dtype];
        if wide {
            let moments = if described.has_momentum() { 1 } else { 2 };
            dtypes.extend(std::iter::repeat_n(Dtype::F32, usize::from(has_master(described)) + moments));
        } else {
            dtypes.extend(described.chunked().map(|tensor| tensor.dtype));
        }
        if spilled {
            dtypes.push(spill_dtype(store, record)?);
        }
        let mut bytes: usize = 0;
        let mut tensors = Vec::with_capacity(dtypes.len());
        for dtype in dtypes {
            let element = dtype.bytes() as usize;
            tensors.push((bytes, element));
            bytes = bytes.saturating_add(elements.saturating_mul(element).next_multiple_of(ALIGN));
        }
        Ok(Self { tensors, elements, spilled, wide, bytes })
    }

    /// Returns the values, the state tensors, and the gradient, as parts of `all`, the memory of the whole record.
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

/// Returns the elements of a chunk in each widened tensor of `all`, the memory of the whole record. The chunk has
/// `count` elements, beginning with element `start`. The tensors are master weights, first moment and second moment.
///
/// # Safety
/// `plan.wide` must be true. No operation on `all` may be in flight, and nothing else may access these elements while
/// the slices live.
#[expect(clippy::mut_from_ref, reason = "the whole is shared memory; the caller guarantees exclusive access")]
unsafe fn wide_parts<'a>(
    described: &Record,
    plan: &Plan,
    all: &'a Shared,
    (start, count): (usize, usize),
) -> WideState<&'a mut [f32]> {
    let tensors = plan.tensors.iter().skip(1).take(plan.tensors.len() - 1 - usize::from(plan.spilled));
    let mut places = tensors.map(|&(at, element)| {
        // SAFETY: the caller guarantees exclusive access; tensors are disjoint and aligned to 64 bytes.
        unsafe { elements_mut(all, at + start * element, count) }
    });
    let master = if has_master(described) { places.next() } else { None };
    WideState { master, first: places.next(), second: places.next() }
}

/// Returns the parts of a staging chunk that are copied unchanged: values, state that is not widened, and gradient.
/// Each part comes with the offset of its tensor in the whole, and with the size of an element of this tensor.
fn staged(
    bench: &Workbench<'_>,
    (record, chunk): (usize, u32),
    memory: &Shared,
    plan: &Plan,
) -> Result<Vec<(Shared, (usize, usize))>> {
    let elements = bench.elements(record, chunk).len();
    let tensors = &plan.tensors;
    let mut parts = vec![(inside(&bench.part(record, chunk, memory)?, 0, elements * tensors[0].1)?, tensors[0])];
    if !plan.wide {
        for ((_, at, nbytes), &place) in bench.in_chunk(record, chunk).zip(&tensors[1..]) {
            parts.push((inside(memory, at, nbytes)?, place));
        }
    }
    if plan.spilled {
        let (part, used) = bench.spill_part(record, chunk, memory)?;
        parts.push((inside(&part, 0, used)?, tensors[tensors.len() - 1]));
    }
    Ok(parts)
}

/// Returns the turn of a chunk, the chunk's first element in the record, and its number of elements.
fn turn_of(bench: &Workbench<'_>, (record, chunk): (usize, u32), memory: &Shared) -> (Turn, (usize, usize)) {
    let elements = bench.elements(record, chunk);
    (Turn { record, index: chunk, memory: memory.clone() }, (elements.start, elements.len()))
}

/// Copies a chunk from its staging chunk to `all`, the memory of the whole record. If `plan.wide`, widens the chunk's
/// state.
pub(crate) fn gathered(
    bench: &Workbench<'_>,
    of: (usize, u32),
    memory: &Shared,
    plan: &Plan,
    all: &Shared,
) -> Result<()> {
    let (turn, elements) = turn_of(bench, of, memory);
    for (part, (at, element)) in staged(bench, of, memory, plan)? {
        let place = inside(all, at + elements.0 * element, part.len())?;
        // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
        let from = unsafe { bytes_mut(&part) };
        // SAFETY: only this job uses the whole, one turn at a time. The whole is disjoint from the staging chunk.
        unsafe { bytes_mut(&place) }.copy_from_slice(from);
    }
    if plan.wide {
        let described = &bench.store.description().records[of.0];
        // SAFETY: only this job uses the whole, and each turn uses different elements.
        let wide = unsafe { wide_parts(described, plan, all, elements) };
        decode(reduced::chunk(bench, &turn)?, wide, bench.exec)?;
    }
    Ok(())
}

/// Copies a chunk from `all`, the memory of the whole record, to the staging chunk. The pipeline then writes the
/// staging chunk. This function does not copy the gradient, because the job does not write the gradient.
pub(crate) fn scattered(
    bench: &Workbench<'_>,
    of: (usize, u32),
    memory: &Shared,
    plan: &Plan,
    all: &Shared,
) -> Result<()> {
    let (turn, elements) = turn_of(bench, of, memory);
    for extent in bench.extents_of_chunk(of.0, of.1) {
        // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
        unsafe { clear_from(&bench.part(of.0, extent, memory)?, 0) };
    }
    let mut parts = staged(bench, of, memory, plan)?;
    parts.truncate(parts.len() - usize::from(plan.spilled));
    for (part, (at, element)) in parts {
        let place = inside(all, at + elements.0 * element, part.len())?;
        // SAFETY: only this job uses the whole, and the user's function has returned.
        let from = unsafe { bytes_mut(&place) };
        // SAFETY: only this turn uses the staging chunk, which is disjoint from the whole.
        unsafe { bytes_mut(&part) }.copy_from_slice(from);
    }
    if plan.wide {
        let described = &bench.store.description().records[of.0];
        // SAFETY: only this job uses the whole. The user's function has returned, and the slice `from` is no longer
        // used.
        let WideState { master, first, second } = unsafe { wide_parts(described, plan, all, elements) };
        let wide = WideState {
            master: master.map(|part| &*part),
            first: first.map(|part| &*part),
            second: second.map(|part| &*part),
        };
        // For values of 16 bits, `encode` rounds the master weights and overwrites the values. So values that the
        // user's function wrote are lost.
        encode(wide, reduced::chunk(bench, &turn)?, bench.exec)?;
    }
    Ok(())
}
