//! Jobs: what the pipeline is asked to do, one kind per file.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use memascend_store::Shared;

use crate::{
    Counters, Error, Result,
    bench::{Bench, Read, Write},
    caller::Call,
};

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

    /// Whether it is arithmetic of ours, which several threads may do on one held entry, where that lies.
    fn is_ours(&self) -> bool {
        true
    }

    /// What it leaves in its entry's room for a gradient if it succeeds.
    fn leaves(&self) -> Leaves {
        Leaves::Same
    }

    /// Takes the memory that it needs beside staging chunks; `false` if that is not free yet.
    fn claim(&self, _bench: &Bench<'_>, _entry: usize) -> Result<bool> {
        Ok(true)
    }

    /// Readies the entry for the first turn.
    fn begin(&self, bench: &Bench<'_>, entry: usize) -> Result<()>;

    /// Turns that it takes, each with a staging chunk to itself.
    fn turns(&self, bench: &Bench<'_>, entry: usize) -> u32 {
        bench.chunks_of(entry)
    }

    /// Begins what a turn reads. A read that was begun is waited for when it is dropped.
    fn reads<'a>(&self, _bench: &Bench<'a>, _turn: &Turn) -> Result<Vec<Read<'a>>> {
        Ok(Vec::new())
    }

    /// The one turn, if any, whose arithmetic is a call on a thread of its own: turns of other jobs are read, computed and
    /// written meanwhile. It reads and writes nothing, and the job's next turn begins after it.
    fn called_at(&self, _bench: &Bench<'_>, _entry: usize) -> Option<u32> {
        None
    }

    /// What is called in that turn.
    fn call(&self, _bench: &Bench<'_>, _turn: &Turn) -> Result<Call> {
        Err(Error::Invalid("a job that calls nothing".into()))
    }

    /// The arithmetic of any other turn, once its reads have arrived.
    fn compute(&self, bench: &Bench<'_>, turn: &Turn) -> Result<()>;

    /// Begins what a turn writes. A write that was begun is waited for when it is dropped.
    fn writes<'a>(&self, _bench: &mut Bench<'a>, _turn: &Turn) -> Result<Vec<Write<'a>>> {
        Ok(Vec::new())
    }

    /// Where it is counted once it was computed to its end.
    fn counted<'a>(&self, _counters: &'a mut Counters) -> Option<&'a mut u64> {
        None
    }
}

/// A turn of a job: which, and the staging chunk that is its own.
pub(crate) struct Turn {
    pub(crate) entry: usize,
    pub(crate) index: u32,
    pub(crate) memory: Shared,
}

/// One job: what is to be done with one entry.
pub(crate) struct Job {
    pub(crate) work: Box<dyn Work>,
    pub(crate) mark: Arc<Mark>,
}

/// What a job that succeeds leaves in its entry's room for a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaves {
    /// What was there.
    Same,
    Gradient,
    Nothing,
}

/// What callers and the pipeline know of a job that waits or runs.
#[derive(Debug)]
pub(crate) struct Mark {
    pub(crate) entry: usize,
    /// Bytes of the caller's that it holds until it has used them.
    pub(crate) nbytes: usize,
    pub(crate) leaves: Leaves,
    /// It is to be dropped as soon as may be.
    cancelled: AtomicBool,
    /// It was computed to its end.
    completed: AtomicBool,
}

impl Mark {
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Relaxed);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Relaxed)
    }

    pub(crate) fn complete(&self) {
        self.completed.store(true, Relaxed);
    }

    pub(crate) fn is_completed(&self) -> bool {
        self.completed.load(Relaxed)
    }
}

impl Job {
    pub(crate) fn new(entry: usize, work: impl Work + 'static) -> Self {
        Self::boxed(entry, Box::new(work))
    }

    pub(crate) fn boxed(entry: usize, work: Box<dyn Work>) -> Self {
        let (nbytes, leaves) = (work.nbytes(), work.leaves());
        let (cancelled, completed) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { work, mark: Arc::new(Mark { entry, nbytes, leaves, cancelled, completed }) }
    }
}
