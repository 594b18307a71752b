//! Updates a record by one of our kernels, chunk by chunk: read, compute, write.

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

/// The gradient that a record is updated by.
pub enum By {
    /// The caller's.
    Given(Gradient),
    /// The one that is spilled, multiplied by each of these factors in turn, in fp32 and rounded to its dtype each time,
    /// as torch's `mul_` does it. It stays there.
    Spilled(Vec<f32>),
}

pub(crate) struct KernelUpdate {
    by: By,
    /// The gradient that is kept in memory instead of spilled, where the record is in RAM.
    kept: Option<Arc<Kept>>,
    /// Spills the gradient on its way here, so that nothing reads it from storage.
    spill: Option<Spill>,
    /// The values that it starts from, where the caller has them.
    live: Option<Live>,
    rule: Rule,
}

impl KernelUpdate {
    pub(crate) fn new(
        store: &Store,
        record: usize,
        by: By,
        values: Option<Box<dyn Buffer>>,
        rule: Rule,
    ) -> Result<Self> {
        require_update(match &by {
            By::Given(gradient) => gradient.dtype(),
            By::Spilled(_) => spill_dtype(store, record)?,
        })?;
        let description = store.description();
        require_state(description, record, &rule)?;
        let live = values.map(|values| Live::new(store, record, values)).transpose()?.flatten();
        rule.check()?;
        Ok(Self { by, kept: None, spill: None, live, rule })
    }

    /// The same, by a gradient that is kept in memory instead of spilled.
    pub(crate) fn by_kept(self, kept: Option<Arc<Kept>>) -> Self {
        Self { kept, ..self }
    }

    /// The same, by a gradient that is spilled in the same turns.
    pub(crate) fn spilling(self, spill: Spill) -> Self {
        Self { spill: Some(spill), ..self }
    }

    /// What the log keeps of it: its gradient as it came, and what that is applied with. `None` where it reads a spilled
    /// gradient from storage.
    pub(crate) fn logged(&self, store: &Store, record: usize) -> Result<Option<(Logged, memascend_store::LoggedRule)>> {
        let described = &store.description().records[record];
        let (logged, factors) = match (&self.by, &self.kept) {
            (By::Given(gradient), _) => (Logged::new(gradient.memory()?, gradient.dtype()), &[][..]),
            (By::Spilled(factors), Some(kept)) => (Logged::new(Arc::clone(&kept.memory), kept.dtype), &factors[..]),
            (By::Spilled(_), None) => return Ok(None),
        };
        Ok(Some((logged, rule::rule_of(described, &self.rule, factors)?)))
    }

    /// Whether it reads a spilled gradient from storage.
    fn is_spilled(&self) -> bool {
        matches!(self.by, By::Spilled(_)) && self.kept.is_none() && self.spill.is_none()
    }
}

impl Work for KernelUpdate {
    fn nbytes(&self) -> usize {
        match &self.by {
            By::Given(gradient) => gradient.nbytes(),
            By::Spilled(_) => self.spill.as_ref().map_or(0, Work::nbytes),
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
        match &self.by {
            By::Given(gradient) => {
                let gradient = gradient.part(bench.store, turn.record, elements.start, elements.len())?;
                stepped(bench, turn, gradient, &self.rule)
            }
            By::Spilled(factors) => {
                if let Some(kept) = &self.kept {
                    kept.lay(bench, turn)?;
                }
                let dtype = spill_dtype(bench.store, turn.record)?;
                let (part, _) = bench.spill_part(turn.record, turn.index, &turn.memory)?;
                for factor in factors {
                    // SAFETY: nothing is in flight of this chunk, which is this turn's.
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

/// The arithmetic on one chunk.
pub(crate) fn stepped(bench: &Workbench<'_>, turn: &Turn, gradient: Floats<'_>, rule: &Rule) -> Result<()> {
    match rule {
        Rule::Adam(numbers) if !reduced::is_reduced(&bench.store.description().records[turn.record]) => {
            single(bench, turn, gradient, &numbers.scalars()?)
        }
        _ => reduced::stepped(bench, turn, gradient, rule),
    }
}

/// The arithmetic of Adam with float32 moments.
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
        let start = starts.next().ok_or_else(|| Error::Invalid("a record without Adam's state".into()))?;
        // SAFETY: the tensors of a chunk lie side by side in its extent, aligned to 64 bytes; nothing else uses the
        // chunk between the end of its reads and the beginning of its writes.
        Ok::<_, Error>(unsafe { elements_mut::<f32>(&state, start, elements) })
    };
    // SAFETY: as above; what fills the last page of the values is written as zeros.
    unsafe { clear_from(&values, elements * dtype.bytes() as usize) };
    // SAFETY: as above.
    let (master, out) = match unsafe { floats_mut(&values, dtype, elements) } {
        FloatsMut::F32(master) => (master, None),
        out => (next()?, Some(out)),
    };
    let state = AdamState { master, exp_avg: next()?, exp_avg_sq: next()? };
    Ok(adam(state, gradient, out, scalars, bench.exec)?)
}

/// Refuses a record that does not have the state of a rule.
pub(crate) fn require_state(description: &Description, record: usize, rule: &Rule) -> Result<()> {
    let described = &description.records[record];
    let name = &described.name;
    match rule {
        Rule::Adam(_) if has_adam(described) => Ok(()),
        Rule::Adam(_) => Err(Error::Invalid(format!(
            "{name:?} does not have Adam's state: float32 tensors of its shape, two moments, and before them a master where \
             its values are of 16 bits; or a state in a format of its own"
        ))),
        Rule::Momentum(_) if reduced::is_reduced(described) && described.has_momentum() => Ok(()),
        Rule::Momentum(numbers) if has_sgd(described) && (numbers.momentum == 0.0 || described.has_momentum()) => {
            Ok(())
        }
        Rule::Momentum(_) => Err(Error::Invalid(format!(
            "{name:?} does not have the state of SGD: float32 tensors of its shape, a momentum where there is one, and before \
             it a master where its values are of 16 bits; or a momentum in a format of its own"
        ))),
    }
}

/// Whether a record has the state of torch's SGD as it is: float32 values or a master, and a momentum or none.
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

/// Whether a record has what Adam needs: two moments, and a master unless its own values are one, all of them float32
/// and of its shape; or a state in a format of its own.
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
