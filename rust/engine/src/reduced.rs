//! Updates records in a reduced format, and plain records by SGD. A reduced format has moments in 16 or 8 bits, compact
//! master weights, or no master weights. `compact.rs` updates records in [`Format::Compact`], which does not count as
//! reduced.

use memascend_math::{Bf16, Codes, F16, Floats, FloatsMut, Moments, Position, Random, Reduced, Rule, Weights, update};
use memascend_store::{BLOCK, Dtype, Format, Master, MomentForm, Record, key_of};

use crate::{
    Error, Result,
    turn::Turn,
    workbench::{Workbench, clear_from},
};

/// True if the state is in a reduced format. The formats `Plain` and `Compact` are not reduced: for these two formats,
/// the float32 kernels compute Adam.
pub(crate) fn is_reduced(record: &Record) -> bool {
    !matches!(record.format, Format::Plain | Format::Compact)
}

/// Updates one chunk in place. The read of the chunk must have ended.
pub(crate) fn stepped(bench: &Workbench<'_>, turn: &Turn, gradient: Floats<'_>, rule: &Rule) -> Result<()> {
    let described = &bench.store.description().records[turn.record];
    let state = chunk(bench, turn)?;
    let random = Random { key: key_of(&described.name, rule.seed()), step: rule.step() };
    // Stochastic rounding draws a random number for the index of an element in the whole parameter. So the result does
    // not depend on the shards of the parameter.
    let first = bench.store.first_element(turn.record) + bench.elements(turn.record, turn.index).start as u64;
    Ok(update(state, gradient, rule, Position { random, first }, bench.exec)?)
}

/// Returns the weights and moments of the chunk of a turn. Fills the unused rest of the last page of the values with
/// zeros.
pub(crate) fn chunk<'a>(bench: &Workbench<'_>, turn: &'a Turn) -> Result<Reduced<'a>> {
    let &Turn { record, index: chunk, ref memory } = turn;
    let described = &bench.store.description().records[record];
    let elements = bench.elements(record, chunk).len();
    let state = bench.state_extent(record, chunk).map(|extent| bench.part(record, extent, memory)).transpose()?;
    let values = bench.part(record, chunk, memory)?;
    // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
    unsafe { clear_from(&values, elements * described.dtype.bytes() as usize) };
    let first = state.map_or(0, |state| state.as_ptr().as_ptr().expose_provenance());
    let places = bench.in_chunk(record, chunk).map(|(_, at, _)| first + at);
    let form = Form { format: described.format, dtype: described.dtype, has_momentum: described.has_momentum() };
    // SAFETY: only this turn uses the chunk now. The tensors of a chunk are disjoint in its extent, and aligned to 64
    // bytes. An extent in a staging chunk stays mapped while the turn holds the chunk. An extent in the RAM tier stays
    // mapped while the store holds the RAM tier. Memory that the caller gave for one chunk stays mapped while `bench`
    // holds it.
    unsafe { form.at(elements, values.as_ptr().as_ptr().expose_provenance(), places) }
}

/// Determines which tensors the state of a parameter has, and their types.
#[derive(Debug, Clone, Copy)]
pub struct Form {
    /// The format of the state.
    pub format: Format,
    /// The dtype of the values.
    pub dtype: Dtype,
    /// True if the state has one moment, the momentum of SGD or Muon. If false, the state has the two moments of Adam,
    /// or no moment if the format is [`Format::Plain`].
    pub has_momentum: bool,
}

impl Form {
    /// Returns the weights and moments of `elements` elements. `values` is the address of the values. `state` gives the
    /// address of each state tensor, in the order of the tensors. Returns an error if `state` gives too few addresses,
    /// or if the master weights are compact and the values are not bfloat16.
    ///
    /// # Safety
    /// Each address must be valid for reads and writes of the elements that belong to it, aligned for their type, and
    /// not borrowed elsewhere while the result lives. The provenance of each address must be exposed.
    pub unsafe fn at<'a>(
        self,
        elements: usize,
        values: usize,
        state: impl Iterator<Item = usize>,
    ) -> Result<Reduced<'a>> {
        // SAFETY: the caller guarantees that the addresses in `state` are valid, aligned and exclusive.
        let mut tensors = unsafe { Tensors::new(state) };
        // SAFETY: the caller guarantees that the address `values` is valid, aligned and exclusive.
        let mut of_values = unsafe { Tensors::new(std::iter::once(values)) };
        let values = match self.dtype {
            Dtype::F32 => FloatsMut::F32(of_values.next(elements)?),
            Dtype::Bf16 => FloatsMut::Bf16(of_values.next::<Bf16>(elements)?),
            _ => FloatsMut::F16(of_values.next::<F16>(elements)?),
        };
        let form = self.format.moments();
        let weights = match (self.format.master(), values) {
            (Master::Own, FloatsMut::F32(values)) => Weights::Single(values),
            (Master::Own, values) => Weights::Master { master: tensors.next(elements)?, values },
            (Master::Compact, FloatsMut::Bf16(values)) => {
                let rest = tensors.next(elements)?;
                let has_bits = self.has_momentum || form == MomentForm::EightBit;
                let rounded_up = has_bits.then(|| tensors.next(elements.div_ceil(8))).transpose()?;
                Weights::Compact { values, rest, rounded_up }
            }
            (Master::None, values) => Weights::Stochastic(values),
            (Master::Compact, _) => return Err(Error::Invalid("compact master weights need bfloat16 values".into())),
        };
        let has_second = !self.has_momentum;
        let moments = match form {
            MomentForm::Single if self.format == Format::Plain && !self.has_momentum => Moments::Nothing,
            MomentForm::Single => {
                Moments::Single(tensors.next(elements)?, has_second.then(|| tensors.next(elements)).transpose()?)
            }
            MomentForm::Bf16 => {
                Moments::Bf16(tensors.next(elements)?, has_second.then(|| tensors.next(elements)).transpose()?)
            }
            MomentForm::EightBit => {
                let blocks = elements.div_ceil(BLOCK as usize);
                let first = tensors.next(elements)?;
                let second = has_second.then(|| tensors.next(elements)).transpose()?;
                let first = Codes { codes: first, absmax: tensors.next(blocks)? };
                let second = second.map(|codes| Ok::<_, Error>(Codes { codes, absmax: tensors.next(blocks)? }));
                Moments::Blocks(first, second.transpose()?)
            }
        };
        Ok(Reduced { weights, moments })
    }
}

/// Makes one slice from each address. `next` uses the addresses in their order.
struct Tensors<I>(I);

impl<I: Iterator<Item = usize>> Tensors<I> {
    /// # Safety
    /// Each address must be valid for the slice that [`Tensors::next`] makes of it, aligned, and not borrowed elsewhere
    /// while that slice lives. The provenance of each address must be exposed.
    unsafe fn new(addresses: I) -> Self {
        Self(addresses)
    }

    fn next<'a, T>(&mut self, count: usize) -> Result<&'a mut [T]> {
        let lacks =
            || Error::Invalid("the state has fewer tensors than its format needs: give all state tensors".into());
        let address = self.0.next().ok_or_else(lacks)?;
        if count == 0 {
            return Ok(&mut []);
        }
        // SAFETY: the caller of `new` guarantees that each address is valid for its slice, aligned and exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), count) })
    }
}
