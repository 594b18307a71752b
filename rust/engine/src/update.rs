//! Updates a record with a kernel of this library. For each chunk, reads the state, computes the update, and writes the
//! new state.

use std::sync::Arc;

use memascend_math::{AdamState, Floats, FloatsMut, Rule, Scalars, adam, scale};
use memascend_store::{Buffer, Description, Dtype, Format, Record, StateTensor, Store};

use crate::{
    Counters, Error, Gradient, Result, compact,
    gradient::require_update,
    job::Work,
    live::{self, Live},
    log_record::Logged,
    ram_tier::Kept,
    reduced, rule,
    spill::{Spill, required, spill_dtype},
    turn::{Leaves, Turn},
    workbench::{Read, Workbench, Write, clear_from, elements_mut, floats, floats_mut},
};

/// The gradient of an update.
pub enum GradientSource {
    /// A gradient that the caller gives.
    Given(Gradient),
    /// The spilled gradient of the record. The update multiplies the gradient by each of these factors, one after the
    /// other. Each product is computed in float32 and rounded to the dtype of the gradient, as torch's `mul_` does. The
    /// spilled gradient itself does not change.
    Spilled(Vec<f32>),
}

pub(crate) struct KernelUpdate {
    source: GradientSource,
    /// The gradient of a record in RAM, if the caller has spilled it. Such a gradient stays in memory.
    kept: Option<Arc<Kept>>,
    /// With a [`Spill`], the turns of this update also spill the gradient. The update then takes the gradient from the
    /// staging chunk, and does not read it from storage.
    spill: Option<Spill>,
    /// The record's values in the caller's memory. With `None`, an update that computes with the values reads them from
    /// the store.
    live: Option<Live>,
    rule: Rule,
}

impl KernelUpdate {
    pub(crate) fn new(
        store: &Store,
        record: usize,
        source: GradientSource,
        values: Option<Box<dyn Buffer>>,
        rule: Rule,
    ) -> Result<Self> {
        require_update(match &source {
            GradientSource::Given(gradient) => gradient.dtype(),
            GradientSource::Spilled(_) => spill_dtype(store, record)?,
        })?;
        let description = store.description();
        require_state(description, record, &rule)?;
        let live = values.map(|values| Live::new(store, record, values)).transpose()?.flatten();
        rule.check()?;
        Ok(Self { source, kept: None, spill: None, live, rule })
    }

    /// Sets `kept`. If `kept` is `Some`, the update takes the gradient of the record from `kept`.
    pub(crate) fn by_kept(self, kept: Option<Arc<Kept>>) -> Self {
        Self { kept, ..self }
    }

    /// Makes the update also spill its gradient.
    pub(crate) fn spilling(self, spill: Spill) -> Self {
        Self { spill: Some(spill), ..self }
    }

    /// Returns the data of this update that the log stores: the rule, and the gradient before it is multiplied by any
    /// factor. Returns `None` if the update uses a spilled gradient that is not kept in memory.
    pub(crate) fn logged(&self, store: &Store, record: usize) -> Result<Option<(Logged, memascend_store::LoggedRule)>> {
        let described = &store.description().records[record];
        let (logged, factors) = match (&self.source, &self.kept) {
            (GradientSource::Given(gradient), _) => (Logged::new(gradient.memory()?, gradient.dtype()), &[][..]),
            (GradientSource::Spilled(factors), Some(kept)) => {
                (Logged::new(Arc::clone(&kept.memory), kept.dtype), &factors[..])
            }
            (GradientSource::Spilled(_), None) => return Ok(None),
        };
        Ok(Some((logged, rule::rule_of(described, &self.rule, factors)?)))
    }

    /// True if the update reads a spilled gradient from storage.
    fn is_spilled(&self) -> bool {
        matches!(self.source, GradientSource::Spilled(_)) && self.kept.is_none() && self.spill.is_none()
    }
}

impl Work for KernelUpdate {
    fn nbytes(&self) -> usize {
        match &self.source {
            GradientSource::Given(gradient) => gradient.nbytes(),
            GradientSource::Spilled(_) => self.spill.as_ref().map_or(0, Work::nbytes),
        }
    }

    fn leaves(&self) -> Leaves {
        self.spill.as_ref().map_or(Leaves::Same, Work::leaves)
    }

    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()> {
        if self.is_spilled() {
            required(bench.store, record)?;
        }
        if let Some(spill) = &self.spill {
            spill.begin(bench, record)?;
        }
        bench.begin(record, self.rule.step())
    }

    fn reads<'a>(&self, bench: &Workbench<'a>, turn: &Turn) -> Result<Vec<Read<'a>>> {
        let &Turn { record, index: chunk, ref memory } = turn;
        let mut reads = Vec::with_capacity(3);
        if self.live.is_none() && live::are_needed(&bench.store.description().records[record]) {
            reads.push(bench.read(record, chunk, memory)?);
        }
        if let Some(state) = bench.state_extent(record, chunk) {
            reads.push(bench.read(record, state, memory)?);
        }
        if self.is_spilled() {
            reads.push(bench.read_spill(record, chunk, memory)?);
        }
        Ok(reads)
    }

    fn compute(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        if let Some(live) = &self.live {
            live.take(bench, turn)?;
        }
        if let Some(spill) = &self.spill {
            spill.compute(bench, turn)?;
        }
        let elements = bench.elements(turn.record, turn.index);
        match &self.source {
            GradientSource::Given(gradient) => {
                let gradient = gradient.part(bench.store, turn.record, elements.start, elements.len())?;
                stepped(bench, turn, gradient, &self.rule)
            }
            GradientSource::Spilled(factors) => {
                if let Some(kept) = &self.kept {
                    kept.lay(bench, turn)?;
                }
                let dtype = spill_dtype(bench.store, turn.record)?;
                let (part, _) = bench.spill_part(turn.record, turn.index, &turn.memory)?;
                for factor in factors {
                    // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
                    scale(unsafe { floats_mut(&part, dtype, elements.len()) }, *factor, bench.exec);
                }
                stepped(bench, turn, floats(&part, dtype, 0, elements.len()), &self.rule)
            }
        }
    }

    fn writes<'a>(&self, bench: &mut Workbench<'a>, turn: &Turn) -> Result<Vec<Write<'a>>> {
        let &Turn { record, index: chunk, ref memory } = turn;
        let mut writes = bench.stage_chunk(record, chunk, memory)?;
        if let Some(spill) = &self.spill {
            writes.extend(spill.writes(bench, turn)?);
        }
        Ok(writes)
    }

    fn counted<'a>(&self, counters: &'a mut Counters) -> Option<&'a mut u64> {
        Some(&mut counters.updates)
    }
}

/// Updates one chunk in place, with the kernel for the rule and the record's format.
pub(crate) fn stepped(bench: &Workbench<'_>, turn: &Turn, gradient: Floats<'_>, rule: &Rule) -> Result<()> {
    match rule {
        Rule::Adam(numbers) if !reduced::is_reduced(&bench.store.description().records[turn.record]) => {
            single(bench, turn, gradient, &numbers.scalars()?)
        }
        _ => reduced::stepped(bench, turn, gradient, rule),
    }
}

/// Updates one chunk in place with Adam on float32 moments.
pub(crate) fn single(bench: &Workbench<'_>, turn: &Turn, gradient: Floats<'_>, scalars: &Scalars) -> Result<()> {
    let &Turn { record, index: chunk, ref memory } = turn;
    let described = &bench.store.description().records[record];
    if described.is_compact() {
        return compact::stepped(bench, turn, gradient, scalars);
    }
    let dtype = described.dtype;
    let elements = bench.elements(record, chunk).len();
    let state = bench.part(record, bench.chunks_of(record) + chunk, memory)?;
    let values = bench.part(record, chunk, memory)?;
    let mut starts = bench.in_chunk(record, chunk).map(|(_, start, _)| start);
    let mut next = || {
        let start =
            starts.next().ok_or_else(|| Error::Invalid("report this bug: a state of Adam is missing".into()))?;
        // SAFETY: the tensors of a chunk are disjoint in its extent and aligned to 64 bytes; see [Note: a turn owns its
        // staging chunk].
        Ok::<_, Error>(unsafe { elements_mut::<f32>(&state, start, elements) })
    };
    // SAFETY: the turn also owns the part that holds the values. The unused rest of the last page of this part is
    // stored as zeros.
    unsafe { clear_from(&values, elements * dtype.bytes() as usize) };
    // SAFETY: the turn owns the part that holds the values, and `clear_from` no longer uses the part.
    let (master, out) = match unsafe { floats_mut(&values, dtype, elements) } {
        FloatsMut::F32(master) => (master, None),
        out => (next()?, Some(out)),
    };
    let state = AdamState { master, exp_avg: next()?, exp_avg_sq: next()? };
    Ok(adam(state, gradient, out, scalars, bench.exec)?)
}

/// Returns an error if the record does not have the state that the rule needs.
pub(crate) fn require_state(description: &Description, record: usize, rule: &Rule) -> Result<()> {
    let described = &description.records[record];
    let name = &described.name;
    match rule {
        Rule::Adam(_) if has_adam(described) => Ok(()),
        Rule::Adam(_) => Err(Error::Invalid(format!(
            "{name:?} does not have Adam's state. Describe the record with two moments, and with a master before the \
             moments if the values have 16 bits. All of these must be float32 tensors of the record's shape. Or \
             describe the record with another format"
        ))),
        Rule::Momentum(_) if reduced::is_reduced(described) && described.has_momentum() => Ok(()),
        Rule::Momentum(numbers) if has_sgd(described) && (numbers.momentum == 0.0 || described.has_momentum()) => {
            Ok(())
        }
        Rule::Momentum(_) => Err(Error::Invalid(format!(
            "{name:?} does not have the state of SGD. Describe the record with a master if the values have 16 bits, \
             and with a momentum after the master if SGD uses momentum. Both must be float32 tensors of the record's \
             shape. Or describe the record with another format"
        ))),
    }
}

/// True if a record in the plain format has the state of torch's SGD: float32 master weights if the values have 16
/// bits, and optionally a momentum.
pub(crate) fn has_sgd(described: &Record) -> bool {
    let masters = match described.dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 | Dtype::F16 => 1,
        _ => return false,
    };
    let own = |tensor: &StateTensor| tensor.dtype == Dtype::F32 && tensor.shape == described.shape;
    let moments = usize::from(described.has_momentum());
    described.format == Format::Plain
        && described.state.len() == masters + moments
        && described.state.iter().all(own)
        && described.state.iter().take(masters).all(|tensor| tensor.name == "master")
}

/// True if a record has the state of Adam. In the plain format, this is two moments, and master weights if the values
/// have 16 bits. All of these are float32 tensors of the shape of the record. In any other format, a record has the
/// state of Adam if the state has no momentum.
pub(crate) fn has_adam(described: &Record) -> bool {
    if described.format != Format::Plain {
        return !described.has_momentum();
    }
    let all = described.state.iter().all(|tensor| tensor.dtype == Dtype::F32 && tensor.shape == described.shape);
    let count = match described.dtype {
        Dtype::F32 => 2,
        Dtype::Bf16 | Dtype::F16 => 3,
        _ => return false,
    };
    all && described.state.len() == count
}
