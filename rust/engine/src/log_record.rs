//! Appends the gradient of a record in RAM to the log, and stages the record as it is before the step where that is due.

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

/// A gradient as the log has it: as it came.
pub(crate) struct Logged {
    memory: Arc<Host>,
    pub(crate) dtype: Dtype,
}

impl Logged {
    pub(crate) fn new(memory: Arc<Host>, dtype: Dtype) -> Self {
        Self { memory, dtype }
    }
}

/// What is written of a record in RAM while the backward goes on. Its update is applied in memory after the commit.
pub(crate) struct Keep {
    /// The gradient, whose place in the log was begun.
    pub(crate) gradient: Option<Logged>,
    /// The record is written whole, as memory has it.
    pub(crate) whole: bool,
}

impl Work for Keep {
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
        // SAFETY: nothing is in flight of this chunk, which is this turn's.
        copied(&**gradient.memory, start, &mut unsafe { bytes_mut(&part) }[..used]);
        // SAFETY: as above; what fills the last page is written as zeros.
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
            // What was begun is kept if one fails: dropping a write waits for it.
            for extent in bench.extents_of_chunk(record, chunk) {
                writes.push(bench.stage_in_ram(record, extent)?);
            }
        }
        Ok(writes)
    }
}

/// Whether updates of a record may be logged: all of its state lies in chunks.
pub(crate) fn may_log(store: &Store, record: usize) -> bool {
    store.description().records[record].whole().next().is_none()
}
