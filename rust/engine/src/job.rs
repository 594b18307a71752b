//! Jobs: what is asked of the pipeline, one kind per file, and the turns in which each is done.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use memascend_mem::Wait;
use memascend_store::Shared;

use crate::{
    Counters, Result,
    apply::Apply,
    bench::{Bench, Read, Write},
    fill::Fill,
    spill::{Spill, Unspill},
    update::Update,
};

/// One job: what is to be done with one entry.
pub(crate) struct Job {
    pub(crate) work: Work,
    pub(crate) mark: Arc<Mark>,
}

/// What is asked.
pub(crate) enum Work {
    Update(Update),
    Fill(Fill),
    Spill(Spill),
    Unspill(Unspill),
    Apply(Apply),
    /// Forgets what is spilled.
    Forget,
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
    pub(crate) fn new(entry: usize, work: Work) -> Self {
        let nbytes = match &work {
            Work::Update(update) => update.nbytes(),
            Work::Fill(fill) => fill.nbytes(),
            Work::Spill(spill) => spill.nbytes(),
            Work::Apply(apply) => apply.nbytes(),
            Work::Unspill(_) | Work::Forget => 0,
        };
        let leaves = match &work {
            Work::Spill(_) => Leaves::Gradient,
            Work::Forget => Leaves::Nothing,
            _ => Leaves::Same,
        };
        let (cancelled, completed) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { work, mark: Arc::new(Mark { entry, nbytes, leaves, cancelled, completed }) }
    }
}

impl Work {
    /// Takes the memory that it needs beside staging chunks; `false` if that is not free yet.
    pub(crate) fn claim(&self, bench: &Bench<'_>, entry: usize) -> Result<bool> {
        if let Self::Apply(apply) = self { apply.claim(bench, entry) } else { Ok(true) }
    }

    /// Readies the entry for the first turn.
    pub(crate) fn begin(&self, bench: &Bench<'_>, entry: usize) -> Result<()> {
        match self {
            Self::Update(update) => update.begin(bench, entry),
            Self::Fill(fill) => Ok(bench.store.begin(entry, fill.step, Wait::forever())?),
            Self::Spill(spill) => spill.begin(bench, entry),
            Self::Apply(apply) => apply.begin(bench, entry),
            Self::Unspill(_) => Unspill::begin(bench, entry),
            Self::Forget => Ok(bench.store.set_spilled(entry, None)?),
        }
    }

    /// Turns that it takes, each with a staging chunk to itself.
    pub(crate) fn turns(&self, bench: &Bench<'_>, entry: usize) -> u32 {
        match self {
            Self::Update(_) | Self::Spill(_) | Self::Unspill(_) => bench.chunks_of(entry),
            Self::Fill(_) => Fill::turns(bench, entry),
            Self::Apply(apply) => apply.turns(bench, entry),
            Self::Forget => 0,
        }
    }

    /// Begins what a turn reads. A read that was begun is waited for when it is dropped.
    pub(crate) fn reads<'a>(
        &self,
        bench: &Bench<'a>,
        entry: usize,
        turn: u32,
        memory: &Shared,
    ) -> Result<Vec<Read<'a>>> {
        match self {
            Self::Update(update) => update.reads(bench, entry, turn, memory),
            Self::Spill(spill) => spill.reads(bench, entry, turn, memory),
            Self::Unspill(_) => Unspill::reads(bench, entry, turn, memory),
            Self::Apply(apply) => apply.reads(bench, entry, turn, memory),
            Self::Fill(_) | Self::Forget => Ok(Vec::new()),
        }
    }

    /// The arithmetic of a turn, once its reads have arrived.
    pub(crate) fn compute(&self, bench: &mut Bench<'_>, entry: usize, turn: u32, memory: &Shared) -> Result<()> {
        match self {
            Self::Update(update) => update.compute(bench, entry, turn, memory),
            Self::Fill(fill) => fill.compute(bench, entry, turn, memory),
            Self::Spill(spill) => spill.compute(bench, entry, turn, memory),
            Self::Unspill(unspill) => unspill.compute(bench, entry, turn, memory),
            Self::Apply(apply) => apply.compute(bench, entry, turn, memory),
            Self::Forget => Ok(()),
        }
    }

    /// Begins what a turn writes. A write that was begun is waited for when it is dropped.
    pub(crate) fn writes<'a>(
        &self,
        bench: &mut Bench<'a>,
        entry: usize,
        turn: u32,
        memory: &Shared,
    ) -> Result<Vec<Write<'a>>> {
        match self {
            Self::Update(_) => Update::writes(bench, entry, turn, memory),
            Self::Fill(_) => Fill::writes(bench, entry, turn, memory),
            Self::Spill(_) => Spill::writes(bench, entry, turn, memory),
            Self::Apply(apply) => apply.writes(bench, entry, turn, memory),
            Self::Unspill(_) | Self::Forget => Ok(Vec::new()),
        }
    }

    /// Counts a job that was computed to its end.
    pub(crate) fn count(&self, counters: &mut Counters) {
        match self {
            Self::Update(_) => counters.updates += 1,
            Self::Fill(_) => counters.fills += 1,
            Self::Spill(_) => counters.spills += 1,
            Self::Apply(_) => counters.applied += 1,
            Self::Unspill(_) | Self::Forget => {}
        }
    }
}
