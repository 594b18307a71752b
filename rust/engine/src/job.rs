//! Jobs: what the pipeline is asked to do, one kind per file.

use std::sync::Arc;

use crate::{
    Counters, Error, Result,
    turn::{Leaves, Mark, Turn},
    workbench::{Read, Workbench, Write},
};

/// A call of a function. It has ended, and holds nothing any more, when its result is there.
pub(crate) type Call = Box<dyn FnOnce() -> Result<()> + Send>;

/// A kind of job. What each of its turns reads, computes and writes; the pipeline keeps the order.
pub(crate) trait Work: Send {
    /// Bytes of the caller's that it holds until it has used them.
    fn nbytes(&self) -> usize {
        0
    }

    /// Whether what it holds counts among what a step holds; first values do not.
    fn is_of_a_step(&self) -> bool {
        true
    }

    /// Whether it is arithmetic of ours, which several threads may do on one record in RAM, where that lies.
    fn is_ours(&self) -> bool {
        true
    }

    /// What it leaves in its record's room for a gradient if it succeeds.
    fn leaves(&self) -> Leaves {
        Leaves::Same
    }

    /// Takes the memory that it needs beside staging chunks; `false` if that is not free yet.
    fn claim(&self, _bench: &Workbench<'_>, _record: usize) -> Result<bool> {
        Ok(true)
    }

    /// Readies the record for the first turn.
    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()>;

    /// Turns that it takes, each with a staging chunk to itself.
    fn turns(&self, bench: &Workbench<'_>, record: usize) -> u32 {
        bench.chunks_of(record)
    }

    /// Begins what a turn reads. A read that was begun is waited for when it is dropped.
    fn reads<'a>(&self, _bench: &Workbench<'a>, _turn: &Turn) -> Result<Vec<Read<'a>>> {
        Ok(Vec::new())
    }

    /// The one turn, if any, whose arithmetic is a call on a thread of its own: turns of other jobs are read, computed and
    /// written meanwhile. It reads and writes nothing, and the job's next turn begins after it.
    fn called_at(&self, _bench: &Workbench<'_>, _record: usize) -> Option<u32> {
        None
    }

    /// What is called in that turn.
    fn call(&self, _bench: &Workbench<'_>, _turn: &Turn) -> Result<Call> {
        Err(Error::Invalid("a job that calls nothing".into()))
    }

    /// The arithmetic of any other turn, once its reads have arrived.
    fn compute(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()>;

    /// Begins what a turn writes. A write that was begun is waited for when it is dropped.
    fn writes<'a>(&self, _bench: &mut Workbench<'a>, _turn: &Turn) -> Result<Vec<Write<'a>>> {
        Ok(Vec::new())
    }

    /// Where it is counted once it was computed to its end.
    fn counted<'a>(&self, _counters: &'a mut Counters) -> Option<&'a mut u64> {
        None
    }
}

/// One job: what is to be done with one record.
pub(crate) struct Job {
    pub(crate) work: Box<dyn Work>,
    pub(crate) mark: Arc<Mark>,
}

impl Job {
    pub(crate) fn new(record: usize, work: impl Work + 'static) -> Self {
        Self::boxed(record, Box::new(work))
    }

    /// One that goes before all others, since somebody computes with its results.
    pub(crate) fn urgent(record: usize, work: impl Work + 'static) -> Self {
        Self { work: Box::new(work), mark: Arc::new(Mark::urgent(record)) }
    }

    pub(crate) fn boxed(record: usize, work: Box<dyn Work>) -> Self {
        let (nbytes, leaves) = (work.nbytes(), work.leaves());
        Self { work, mark: Arc::new(Mark::new(record, nbytes, leaves)) }
    }
}
