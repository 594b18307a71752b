//! Writes the first values and state of a record to storage, one chunk after the other. Reads nothing from storage.

use std::ops::Range;

use memascend_math::{Element as _, Floats, Moments, WideState, encode, widen};
use memascend_store::{Buffer, Content, Dtype, Master, MomentForm, Record, Shared, StateTensor, Store};

use crate::{
    Counters, Error, Result,
    gradient::floats,
    job::Work,
    reduced,
    turn::Turn,
    workbench::{Workbench, Write, bytes_mut, clear_from, elements_mut},
};

/// The name of the state tensor with the master weights. See [`First::state`].
const MASTER: &str = "master";

/// The first contents of the tensors of a record. The job holds this memory until it has copied all contents to staging
/// chunks.
pub struct First {
    /// The values of the record.
    pub values: Box<dyn Buffer>,
    /// The state tensors, in the order of the description. For `None`, the job writes zeros, unless `wide` has the
    /// contents. There is one exception: if the values are float32, bfloat16 or float16, `None` for a float32 tensor
    /// that is named "master" and has the record's shape makes the job write the values, widened to float32.
    pub state: Vec<Option<Box<dyn Buffer>>>,
    /// Float32 contents for state that the record's format stores in fewer bits: compact master weights, and moments in
    /// 16 or 8 bits. The job rounds each float32 number to the nearest number of the format. If master weights are
    /// given, `values` must be the master weights, rounded to the dtype of the values.
    pub wide: WideState<Box<dyn Buffer>>,
    /// The number of updates that the record has had. It is 0 for a new record.
    pub step: u64,
}

/// Where the first contents of a state tensor come from.
enum Source {
    Given(Box<dyn Buffer>),
    Zeros,
    Values,
}

/// A job that writes a [`First`] to storage. `new` has checked that the tensors fit the record.
pub(crate) struct Fill {
    values: Box<dyn Buffer>,
    dtype: Dtype,
    state: Vec<Source>,
    wide: WideState<Box<dyn Buffer>>,
    step: u64,
}

impl Fill {
    pub(crate) fn new(store: &Store, record: usize, first: First) -> Result<Self> {
        let described = &store.description().records[record];
        let wanted = store.tensor_bytes(record)?;
        let name = &described.name;
        if first.state.len() != described.state.len() {
            let (got, wanted) = (first.state.len(), described.state.len());
            return Err(Error::Invalid(format!(
                "{name:?} has {wanted} state tensors, but {got} were given: give a tensor or None for each of them"
            )));
        }
        let given = std::iter::once(Some(&first.values)).chain(first.state.iter().map(Option::as_ref));
        for (tensor, nbytes) in given.zip(&wanted) {
            if let Some(tensor) = tensor.filter(|tensor| tensor.len() != *nbytes) {
                let got = tensor.len();
                return Err(Error::Invalid(format!(
                    "a tensor of {name:?} has {nbytes} bytes, but {got} were given: give each tensor with the shape \
                     and dtype of the description"
                )));
            }
        }
        let widens = |tensor: &StateTensor| {
            tensor.name == MASTER
                && tensor.dtype == Dtype::F32
                && tensor.shape == described.shape
                && matches!(described.dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16)
        };
        let element = described.dtype.bytes() as usize;
        if !first.values.is_empty() && !first.values.as_ptr().addr().is_multiple_of(element) {
            return Err(Error::Invalid(format!(
                "the values of {name:?} are not aligned for their dtype; copy the values to aligned memory"
            )));
        }
        require_wide(described, &first.wide)?;
        let source = |(tensor, given): (&StateTensor, Option<Box<dyn Buffer>>)| match given {
            Some(given) => Source::Given(given),
            None if widens(tensor) => Source::Values,
            None => Source::Zeros,
        };
        let state = described.state.iter().zip(first.state).map(source).collect();
        Ok(Self { values: first.values, dtype: described.dtype, state, wide: first.wide, step: first.step })
    }

    /// Returns the extents that a turn writes.
    fn extents(bench: &Workbench<'_>, record: usize, turn: u32) -> Vec<u32> {
        match turn.checked_sub(bench.chunks_of(record)) {
            None => bench.extents_of_chunk(record, turn).collect(),
            Some(other) => vec![bench.first_other_extent(record) + other],
        }
    }

    /// Rounds one chunk of the tensors in `wide` to the format of the record. `build` must have filled the staging
    /// chunk before. Returns an error if a second moment is negative, or if an element of `values` differs from its
    /// rounded master weight.
    fn narrow(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let &Turn { record, index: chunk, ref memory } = turn;
        let elements = bench.elements(record, chunk);
        let part = |given| wide_part(given, &elements);
        let WideState { master, first, second } = &self.wide;
        let wide = WideState {
            master: part(master.as_deref()),
            first: part(first.as_deref()),
            second: part(second.as_deref()),
        };
        let state = reduced::chunk(bench, turn)?;
        let negative = match (&wide.second, &state.moments) {
            (Some(second), _) => second.iter().any(|&square| square < 0.0),
            (None, Moments::Single(_, Some(second))) => second.iter().any(|&square| square < 0.0),
            (None, Moments::Bf16(_, Some(second))) => second.iter().any(|square| square.to_f32() < 0.0),
            _ => false,
        };
        if negative {
            return Err(Error::Invalid("a second moment is negative: give an exp_avg_sq of at least 0".into()));
        }
        let has_master = wide.master.is_some();
        encode(wide, state, bench.exec)?;
        if !has_master {
            return Ok(());
        }
        let values = bench.part(record, chunk, memory)?;
        let element = self.dtype.bytes() as usize;
        // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
        let rounded = &mut unsafe { bytes_mut(&values) }[..elements.len() * element];
        let mut given = vec![0; rounded.len()];
        copied(&*self.values, elements.start * element, &mut given);
        let differs = |at: &usize| {
            let (rounded, given) = (&rounded[at * element..][..element], &given[at * element..][..element]);
            rounded != given && !(is_nan(self.dtype, rounded) && is_nan(self.dtype, given))
        };
        if let Some(at) = (0..elements.len()).find(differs) {
            let name = &bench.store.description().records[record].name;
            let (at, dtype) = (elements.start + at, self.dtype.name());
            return Err(Error::Invalid(format!(
                "element {at} of {name:?} is not its master weight rounded to {dtype}; round the master weights to get \
                 the values"
            )));
        }
        // Copy the given values, because rounding changes the payload bits of a NaN.
        rounded.copy_from_slice(&given);
        Ok(())
    }

    /// Fills `part`, the memory of an extent, with the first contents of the extent.
    fn build(&self, bench: &Workbench<'_>, record: usize, extent: u32, part: &Shared) -> Result<()> {
        let (store, description) = (bench.store, bench.store.description());
        let place = store.layout().extent(description, record, extent);
        let described = &description.records[record];
        let used = place.used_bytes as usize;
        // `sources(true)` yields the state tensors that are cut into chunks, and `sources(false)` yields all other
        // state tensors. Each tensor comes with its source.
        let sources = |chunked: bool| {
            let of = move |(tensor, _): &(&StateTensor, &Source)| (tensor.grain > 0) == chunked;
            described.state.iter().zip(&self.state).filter(of)
        };
        // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
        unsafe { clear_from(part, used) };
        match place.content {
            Content::Values { chunk } => {
                let element = described.dtype.bytes() as usize;
                // SAFETY: only this turn uses the chunk now.
                copied(
                    &*self.values,
                    bench.elements(record, chunk).start * element,
                    &mut unsafe { bytes_mut(part) }[..used],
                );
            }
            Content::State { chunk } => {
                let elements = bench.elements(record, chunk);
                let mut filled = 0;
                for ((_, at, nbytes), (tensor, source)) in bench.in_chunk(record, chunk).zip(sources(true)) {
                    // SAFETY: only this turn uses the chunk now.
                    let bytes = unsafe { bytes_mut(part) };
                    // The padding between two tensors is stored, too, so fill it with zeros.
                    bytes[filled..at].fill(0);
                    filled = at + nbytes;
                    match source {
                        Source::Given(given) => {
                            let before = tensor.bytes_for(elements.start as u64) as usize;
                            copied(&**given, before, &mut bytes[at..filled]);
                        }
                        Source::Zeros => bytes[at..filled].fill(0),
                        Source::Values => {
                            let values = floats(&*self.values, self.dtype, elements.start, elements.len());
                            // SAFETY: only this turn uses the chunk now, and nothing uses `bytes` after this line. The
                            // tensors of a chunk are aligned to 64 bytes.
                            let master = unsafe { elements_mut::<f32>(part, at, elements.len()) };
                            widen(values, master, bench.exec)?;
                        }
                    }
                }
                // SAFETY: only this turn uses the chunk now.
                unsafe { clear_from(part, filled) };
            }
            Content::Whole { tensor, part: index } => {
                let before = (u64::from(index) * memascend_store::WHOLE_EXTENT_BYTES) as usize;
                // SAFETY: only this turn uses the chunk now.
                let bytes = &mut unsafe { bytes_mut(part) }[..used];
                match sources(false).nth(tensor as usize) {
                    Some((_, Source::Given(given))) => {
                        copied(&**given, before, bytes);
                    }
                    _ => bytes.fill(0),
                }
            }
        }
        Ok(())
    }
}

impl Work for Fill {
    fn nbytes(&self) -> usize {
        let given = self.state.iter().map(|source| if let Source::Given(given) = source { given.len() } else { 0 });
        let wide =
            [&self.wide.master, &self.wide.first, &self.wide.second].into_iter().flatten().map(|given| given.len());
        self.values.len() + given.sum::<usize>() + wide.sum::<usize>()
    }

    fn is_of_a_step(&self) -> bool {
        false
    }

    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()> {
        bench.begin(record, self.step)
    }

    /// The job takes one turn for each chunk, and one turn for each extent of a state tensor that is not cut into
    /// chunks.
    fn turns(&self, bench: &Workbench<'_>, record: usize) -> u32 {
        bench.chunks_of(record) + bench.store.layout().extents_of(record) - bench.first_other_extent(record)
    }

    fn compute(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let &Turn { record, index, ref memory } = turn;
        for extent in Self::extents(bench, record, index) {
            self.build(bench, record, extent, &bench.part(record, extent, memory)?)?;
        }
        let has_wide = self.wide.master.is_some() || self.wide.first.is_some() || self.wide.second.is_some();
        if has_wide && index < bench.chunks_of(record) { self.narrow(bench, turn) } else { Ok(()) }
    }

    fn writes<'a>(&self, bench: &mut Workbench<'a>, turn: &Turn) -> Result<Vec<Write<'a>>> {
        let extents = Self::extents(bench, turn.record, turn.index).into_iter();
        extents.map(|extent| bench.stage(turn.record, extent, &turn.memory)).collect()
    }

    fn counted<'a>(&self, counters: &'a mut Counters) -> Option<&'a mut u64> {
        Some(&mut counters.fills)
    }
}

/// Returns an error if a tensor in `wide` is not aligned, or does not have the record's number of float32 elements.
/// Also returns an error for master weights unless the format stores them in two parts ([`Master::Compact`]), and for a
/// moment if the format stores moments in float32.
fn require_wide(described: &Record, wide: &WideState<Box<dyn Buffer>>) -> Result<()> {
    let name = &described.name;
    let nbytes = described.elements() as usize * size_of::<f32>();
    let narrow = described.format.moments() != MomentForm::Single;
    let master = described.format.master() == Master::Compact;
    let given = [
        ("master", &wide.master, master),
        ("first moment", &wide.first, narrow),
        ("second moment", &wide.second, narrow),
    ];
    for (what, tensor, fits) in given {
        let Some(tensor) = tensor else { continue };
        let aligned = tensor.as_ptr().addr().is_multiple_of(align_of::<f32>());
        if !fits || tensor.len() != nbytes || !(aligned || tensor.is_empty()) {
            let (got, format) = (tensor.len(), described.format.name());
            return Err(Error::Invalid(format!(
                "{name:?}, a record of the format {format:?}, cannot take a float32 {what} of {got} bytes: give a \
                 float32 {what} only if the format stores the {what} in fewer bits or in two parts, and give {nbytes} \
                 bytes of aligned memory"
            )));
        }
    }
    Ok(())
}

/// Returns the elements in the range `elements` of the float32 tensor `given`. Returns `None` if `given` is `None`.
fn wide_part<'a>(given: Option<&'a dyn Buffer>, elements: &Range<usize>) -> Option<&'a [f32]> {
    match floats(given?, Dtype::F32, elements.start, elements.len()) {
        Floats::F32(part) => Some(part),
        _ => None,
    }
}

/// True if `bytes` are a NaN of bfloat16 or float16. False for every other dtype.
fn is_nan(dtype: Dtype, bytes: &[u8]) -> bool {
    match (dtype, bytes) {
        (Dtype::Bf16, &[low, high]) => u16::from_le_bytes([low, high]) & 0x7FFF > 0x7F80,
        (Dtype::F16, &[low, high]) => u16::from_le_bytes([low, high]) & 0x7FFF > 0x7C00,
        _ => false,
    }
}

/// Fills `out` with bytes of `memory`, beginning with byte `start`. Panics if `memory` has too few bytes.
pub(crate) fn copied(memory: &dyn Buffer, start: usize, out: &mut [u8]) {
    assert!(start + out.len() <= memory.len(), "bytes past the end of a tensor");
    // SAFETY: the assertion above keeps the range inside `memory`, which stays mapped while it is borrowed.
    let first = unsafe { memory.as_ptr().add(start) };
    // SAFETY: the assertion above keeps the range inside `memory`. Nothing writes to `memory` ([Note: handed-over
    // memory]), and `out` is borrowed exclusively.
    unsafe { std::ptr::copy_nonoverlapping(first, out.as_mut_ptr(), out.len()) };
}
