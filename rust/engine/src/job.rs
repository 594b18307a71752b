//! Defines jobs, which the pipeline runs. Each kind of job implements the trait [`Work`].

use std::sync::Arc;

use crate::{
    Counters, Error, Result,
    turn::{Leaves, Mark, Turn},
    workbench::{Read, Workbench, Write},
};

/// A call of a user's function, which runs on the thread of [`Caller`](crate::caller::Caller) or on the pipeline's
/// thread. The call drops all captured values before it returns.
pub(crate) type Call = Box<dyn FnOnce() -> Result<()> + Send>;

/// A kind of job. It defines what each turn reads, computes and writes. The pipeline decides the order of the turns.
pub(crate) trait Work: Send {
    /// Returns how many bytes of the caller's tensors count towards the queue's bound while the job holds them. The
    /// values in a [`Live`](crate::live::Live) do not count.
    fn nbytes(&self) -> usize {
        0
    }

    /// True if the job belongs to a step. Only such a job can raise `Counters::queued_peak`. A job that writes first
    /// values does not belong to a step.
    fn is_of_a_step(&self) -> bool {
        true
    }

    /// True if the job calls no function of the user. Only then can several threads update a record of the RAM tier in
    /// place.
    fn is_ours(&self) -> bool {
        true
    }

    /// Returns what the record's place for a spilled gradient contains after the job has succeeded.
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

    /// Returns the number of turns of the job. Each turn gets one staging chunk.
    fn turns(&self, bench: &Workbench<'_>, record: usize) -> u32 {
        bench.chunks_of(record)
    }

    /// Starts the reads of a turn. Dropping a [`Read`] waits until the read has ended.
    fn reads<'a>(&self, _bench: &Workbench<'a>, _turn: &Turn) -> Result<Vec<Read<'a>>> {
        Ok(Vec::new())
    }

    /// Returns the turn in which [`Caller`](crate::caller::Caller) calls a function on a separate thread. Returns
    /// `None` if the job has no such turn. The turn reads and writes nothing. During the call, the pipeline reads,
    /// computes and writes turns of other jobs. The next turn of this job begins after the call.
    fn called_at(&self, _bench: &Workbench<'_>, _record: usize) -> Option<u32> {
        None
    }

    /// Returns the function call for the turn that [`Work::called_at`] returns.
    fn call(&self, _bench: &Workbench<'_>, _turn: &Turn) -> Result<Call> {
        Err(Error::Invalid("report this bug: a job has no function to call".into()))
    }

    /// Computes a turn after its reads have ended. The pipeline does not call `compute` for the turn that
    /// [`Work::called_at`] returns.
    fn compute(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()>;

    /// Starts the writes of a turn. Dropping a [`Write`] waits until the write has ended.
    fn writes<'a>(&self, _bench: &mut Workbench<'a>, _turn: &Turn) -> Result<Vec<Write<'a>>> {
        Ok(Vec::new())
    }

    /// Returns the counter of this kind of job. The pipeline increments the counter once the last turn is computed.
    fn counted<'a>(&self, _counters: &'a mut Counters) -> Option<&'a mut u64> {
        None
    }
}

/// A job on one record. Callers follow the progress of the job through its mark.
pub(crate) struct Job {
    pub(crate) work: Box<dyn Work>,
    pub(crate) mark: Arc<Mark>,
}

impl Job {
    pub(crate) fn new(record: usize, work: impl Work + 'static) -> Self {
        Self::boxed(record, Box::new(work))
    }

    /// Creates an urgent job. A caller waits for the results of this job, so the pipeline runs it before all jobs that
    /// are not urgent.
    pub(crate) fn urgent(record: usize, work: impl Work + 'static) -> Self {
        Self { work: Box::new(work), mark: Arc::new(Mark::urgent(record)) }
    }

    pub(crate) fn boxed(record: usize, work: Box<dyn Work>) -> Self {
        let (nbytes, leaves) = (work.nbytes(), work.leaves());
        Self { work, mark: Arc::new(Mark::new(record, nbytes, leaves)) }
    }
}
