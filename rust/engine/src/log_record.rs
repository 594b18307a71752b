//! Appends the gradient of a record in RAM to the gradient log. If the record is due (`Store::is_due`), also stages the
//! whole record, as it was before the step.

use std::sync::Arc;

use memascend_store::{Dtype, Store};

use crate::{
    Result,
    fill::copied,
    gradient::Host,
    job::Work,
    turn::Turn,
    workbench::{Workbench, Write, bytes_mut, bytes_of, clear_from},
};

/// A gradient for the log, before the update multiplies it by any factor.
pub(crate) struct Logged {
    memory: Arc<Host>,
    pub(crate) dtype: Dtype,
}

impl Logged {
    pub(crate) fn new(memory: Arc<Host>, dtype: Dtype) -> Self {
        Self { memory, dtype }
    }
}

/// A job that writes data of a record in RAM before the commit: the gradient, the whole record, or both. An update of
/// the record runs in memory after the commit.
pub(crate) struct RamTierWrite {
    /// The gradient that the job writes to the log, or `None` if the job only writes the record. `Store::begin_append`
    /// has reserved the place of the gradient in the log.
    pub(crate) gradient: Option<Logged>,
    /// True if the job stages the whole record, as it is in memory.
    pub(crate) whole: bool,
}

impl Work for RamTierWrite {
    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()> {
        if !self.whole {
            return Ok(());
        }
        bench.begin_snapshot(record)
    }

    fn compute(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let Some(gradient) = &self.gradient else { return Ok(()) };
        let (part, used) = bench.log_part(turn, gradient.dtype)?;
        let start = bench.elements(turn.record, turn.index).start * bytes_of(gradient.dtype);
        // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
        copied(&**gradient.memory, start, &mut unsafe { bytes_mut(&part) }[..used]);
        // SAFETY: only this turn uses the chunk now. The unused rest of the last page of `part` is stored as zeros.
        unsafe { clear_from(&part, used) };
        Ok(())
    }

    fn writes<'a>(&self, bench: &mut Workbench<'a>, turn: &Turn) -> Result<Vec<Write<'a>>> {
        let &Turn { record, index: chunk, .. } = turn;
        let mut writes = Vec::with_capacity(3);
        if let Some(gradient) = &self.gradient {
            writes.push(bench.append(turn, gradient.dtype)?);
        }
        if self.whole {
            // On an error, Rust drops `writes`. The drop waits until the started writes have ended.
            for extent in bench.extents_of_chunk(record, chunk) {
                writes.push(bench.stage_in_ram(record, extent)?);
            }
        }
        Ok(writes)
    }
}

/// True if all state of the record is cut into chunks. The log stores updates of such records only.
pub(crate) fn may_log(store: &Store, record: usize) -> bool {
    store.description().records[record].whole().next().is_none()
}
