//! Defines jobs, which the pipeline runs, and [`Work`], which each kind of job implements in a file of its own.

use std::sync::Arc;

use crate::{
    Counters, Error, Result,
    turn::{Leaves, Mark, Turn},
    workbench::{Read, Workbench, Write},
};

/// A function call for [`Caller`](crate::caller::Caller). When its result arrives, the call has dropped everything that
/// it captured.
pub(crate) type Call = Box<dyn FnOnce() -> Result<()> + Send>;

/// A kind of job: defines what each turn reads, computes and writes. The pipeline decides the order of turns.
pub(crate) trait Work: Send {
    /// Returns the bytes of the caller's tensors that the job holds until it has used them.
    fn nbytes(&self) -> usize {
        0
    }

    /// True if the job belongs to a step and so counts towards `Counters::queued_peak`; first values do not.
    fn is_of_a_step(&self) -> bool {
        true
    }

    /// True if our own kernels do the arithmetic. Several threads may then update one record of the RAM tier in place.
    fn is_ours(&self) -> bool {
        true
    }

    /// Returns what the job, if it succeeds, leaves in its record's place for a spilled gradient.
    fn leaves(&self) -> Leaves {
        Leaves::Same
    }

    /// Leases the memory that the job needs in addition to staging chunks. Returns `false` if this memory is not free
    /// yet.
    fn claim(&self, _bench: &Workbench<'_>, _record: usize) -> Result<bool> {
        Ok(true)
    }

    /// Prepares the record before the first turn.
    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()>;

    /// Returns the number of turns. Each turn gets a staging chunk of its own.
    fn turns(&self, bench: &Workbench<'_>, record: usize) -> u32 {
        bench.chunks_of(record)
    }

    /// Begins the reads of a turn. Dropping a read waits for it.
    fn reads<'a>(&self, _bench: &Workbench<'a>, _turn: &Turn) -> Result<Vec<Read<'a>>> {
        Ok(Vec::new())
    }

    /// Returns the turn, if any, whose arithmetic is a call on the thread of [`Caller`](crate::caller::Caller).
    /// Meanwhile the pipeline reads, computes and writes turns of other jobs. This turn reads and writes nothing, and
    /// the job's next turn begins after the call.
    fn called_at(&self, _bench: &Workbench<'_>, _record: usize) -> Option<u32> {
        None
    }

    /// Returns the call of the turn that [`Work::called_at`] names.
    fn call(&self, _bench: &Workbench<'_>, _turn: &Turn) -> Result<Call> {
        Err(Error::Invalid("a job without a function to call".into()))
    }

    /// Does the arithmetic of a turn that [`Work::called_at`] does not name, after the turn's reads have ended.
    fn compute(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()>;

    /// Begins the writes of a turn. Dropping a write waits for it.
    fn writes<'a>(&self, _bench: &mut Workbench<'a>, _turn: &Turn) -> Result<Vec<Write<'a>>> {
        Ok(Vec::new())
    }

    /// Returns the counter that the pipeline increments once the last turn is computed.
    fn counted<'a>(&self, _counters: &'a mut Counters) -> Option<&'a mut u64> {
        None
    }
}

/// A job on one record, and the mark through which callers follow it.
pub(crate) struct Job {
    pub(crate) work: Box<dyn Work>,
    pub(crate) mark: Arc<Mark>,
}

impl Job {
    pub(crate) fn new(record: usize, work: impl Work + 'static) -> Self {
        Self::boxed(record, Box::new(work))
    }

    /// Creates an urgent job: it goes before all jobs that are not urgent, because a caller waits to compute with its
    /// results.
    pub(crate) fn urgent(record: usize, work: impl Work + 'static) -> Self {
        Self { work: Box::new(work), mark: Arc::new(Mark::urgent(record)) }
    }

    pub(crate) fn boxed(record: usize, work: Box<dyn Work>) -> Self {
        let (nbytes, leaves) = (work.nbytes(), work.leaves());
        Self { work, mark: Arc::new(Mark::new(record, nbytes, leaves)) }
    }
}
