//! Leaves updates of streamed records to the next step.
//!
//! [Note: deferred updates] A commit may name a record's spilled gradient in place of a new slot. The record is then
//! *behind*: its slot lacks this one update. A [`Settle`] job *settles* the record: it computes the update from slot
//! and gradient, and stages it, before the next commit at the latest. Until then, `Engine::fetch` computes the record's
//! values from slot and gradient. A discard drops neither the named gradient nor a settled record, because both belong
//! to the last commit.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use memascend_mem::{Wait, locked};
use memascend_store::{Checksum, Commit, Dtype, LoggedRule, Store};

use crate::{
    Counters, Engine, Error, Result, Rule,
    engine::Shared,
    gradient::require_update,
    job::{Job, Work},
    log_record::may_log,
    logged::{applied, fitting},
    queue::QueueState,
    rule::{self, Taken},
    spill::{Spill, spill_dtype},
    turn::{Mark, Turn},
    unit_fetch::Room,
    update::require_state,
    workbench::{Read, Workbench, Write},
};

/// The maximum number of factors of a deferred update; the log stores each factor.
const FACTORS_MAX: usize = 16;

/// The deferred updates of an engine; see [Note: deferred updates].
#[derive(Default)]
pub(crate) struct Deferred(Mutex<State>);

#[derive(Default)]
pub(crate) struct State {
    /// The updates that the next commit will name, by record: update number and rule.
    named: BTreeMap<usize, (u64, LoggedRule)>,
    /// The updates that the last commit named, by record.
    behind: BTreeMap<usize, Arc<Behind>>,
    /// The marks of the jobs that settle each record. A job settles some chunks of the record, or all. The queue may
    /// have dropped some of these jobs.
    settling: BTreeMap<usize, Vec<Arc<Mark>>>,
}

/// An update that the last commit named, and that the record's slot lacks.
pub(crate) struct Behind {
    rule: (Taken, Vec<f32>),
    dtype: Dtype,
    /// The checksum of each chunk's values; 0 until a job has computed the values.
    sums: Box<[AtomicU64]>,
    /// True after the next commit: the slot that this update started from may be overwritten.
    over: AtomicBool,
}

impl Behind {
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }
}

impl Deferred {
    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.0)
    }

    /// Returns the updates that the next commit names.
    pub(crate) fn named(&self) -> Vec<(usize, u64, LoggedRule)> {
        self.lock().named.iter().map(|(&record, (step, rule))| (record, *step, rule.clone())).collect()
    }

    /// Forgets the updates that the next commit would name; if `record` is given, only that record's.
    pub(crate) fn discard(&self, record: Option<usize>) {
        self.lock().named.retain(|&one, _| record.is_some_and(|record| record != one));
    }

    /// Records a commit: updates that were behind are over, and the updates that the commit named are behind.
    pub(crate) fn committed(&self, store: &Store) -> Result<()> {
        let mut state = self.lock();
        let named = std::mem::take(&mut state.named);
        state.settling.clear();
        for behind in std::mem::take(&mut state.behind).values() {
            behind.over.store(true, Relaxed);
        }
        for (record, (_, rule)) in named {
            let chunks = store.layout().chunks_of(record);
            let behind = Behind {
                rule: fitting(store, record, &rule)?,
                dtype: spill_dtype(store, record)?,
                sums: (0..chunks).map(|_| AtomicU64::new(0)).collect(),
                over: AtomicBool::new(false),
            };
            state.behind.insert(record, Arc::new(behind));
        }
        Ok(())
    }

    /// Returns the update that the slot of a record lacks, unless the record is settled.
    pub(crate) fn behind(&self, store: &Store, record: usize) -> Option<Arc<Behind>> {
        self.lock().behind.get(&record).cloned().filter(|_| store.is_behind(record))
    }
}

impl Engine {
    /// Leaves the update of a record by its spilled gradient, multiplied by each factor in turn, to the next step. This
    /// step's commit names the gradient. The record is settled before the next step's commit, or as soon as a reader
    /// needs more than the values that [`Engine::fetch`] computes.
    ///
    /// Returns `false` if the update cannot be deferred: the record is in RAM, has no second place for its gradient or
    /// has state that is not cut into chunks, or `factors` has more than 16 factors.
    pub fn defer(&self, record: usize, rule: impl Into<Rule>, factors: &[f32], mut wait: Wait<'_>) -> Result<bool> {
        let described = self.known(record)?;
        let store = &self.shared.store;
        if !store.defers(record) || !may_log(store, record) || factors.len() > FACTORS_MAX {
            return Ok(false);
        }
        let rule = rule.into();
        require_update(spill_dtype(store, record)?)?;
        require_state(store.description(), record, &rule)?;
        rule.check()?;
        self.will_be_spilled(record)?;
        let logged = rule::rule_of(described, &rule, factors)?;
        self.settle_later(record, &mut wait)?;
        match self.shared.deferred.lock().named.entry(record) {
            Entry::Vacant(place) => drop(place.insert((rule.step(), logged))),
            Entry::Occupied(_) => {
                let name = &described.name;
                return Err(Error::Usage(format!("{name:?} is staged already; commit or discard that first")));
            }
        }
        Ok(true)
    }

    /// Queues a job that settles a record, if it is behind, after the jobs in the queue.
    pub fn settle_later(&self, record: usize, wait: &mut Wait<'_>) -> Result<()> {
        self.known(record)?;
        match self.shared.settling(record, false) {
            Some(job) => self.push(job, wait),
            None => Ok(()),
        }
    }

    /// Returns the number of records that are behind and not settled yet.
    #[must_use]
    pub fn behind(&self) -> usize {
        let state = self.shared.deferred.lock();
        state.behind.keys().filter(|&&record| self.shared.store.is_behind(record)).count()
    }

    /// True if the last commit left any record behind, even if a job has settled the record since. [`Engine::catch_up`]
    /// must commit the settled record before a new step stages it.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        !self.shared.deferred.lock().behind.is_empty()
    }

    /// Settles the records that the last commit left behind, and commits them as a part of the same step. Returns
    /// `false` if no record was behind. Nothing of another step may be staged.
    pub fn catch_up(&self, mut wait: Wait<'_>) -> Result<bool> {
        self.here()?;
        if !self.is_behind() {
            return Ok(false);
        }
        self.settle_rest(&mut wait)?;
        // Urgent jobs wait during the commit: a fetch of another thread must compute from one commit only.
        let _pause = self.shared.queue.paused(&mut wait, "updates that are settled", QueueState::is_idle)?;
        self.shared.queue.lock().failure()?;
        let store = &self.shared.store;
        if store.is_staging() || self.ram_tier.has_waiting() || !self.shared.deferred.named().is_empty() {
            return Err(Error::Usage("a step is staged; commit or discard that first".into()));
        }
        store.commit(Commit { step: store.info().step, ..Commit::default() }, wait)?;
        self.shared.deferred.committed(store)?;
        Ok(true)
    }

    /// Settles all records that are behind. Waits until they are settled and all other jobs have ended.
    pub(crate) fn settle_rest(&self, wait: &mut Wait<'_>) -> Result<()> {
        loop {
            let records: Vec<usize> = self.shared.deferred.lock().behind.keys().copied().collect();
            for record in records {
                if let Some(job) = self.shared.settling(record, false) {
                    self.push_of_step(job, wait)?;
                }
            }
            self.shared.queue.wait(wait, "records to be written", QueueState::is_idle)?.failure()?;
            // A job in flight may have settled only some chunks of a record, or may have been dropped: try again.
            if self.behind() == 0 {
                return Ok(());
            }
        }
    }

    /// Makes the step name the spilled gradients of its deferred updates. If a commit cannot name a gradient in its
    /// present place, first spills the gradient again, to the record's other place.
    pub(crate) fn name_deferred(&self, wait: &mut Wait<'_>) -> Result<()> {
        let store = &self.shared.store;
        let mut moved = Vec::new();
        for (record, ..) in self.shared.deferred.named() {
            if !store.append_spilled(record)? {
                self.push_of_step(Job::new(record, Spill::again(store, record)?), wait)?;
                moved.push(record);
            }
        }
        self.shared.queue.wait(wait, "spilled gradients", QueueState::is_idle)?.failure()?;
        for record in moved {
            if !store.append_spilled(record)? {
                let name = &store.description().records[record].name;
                return Err(Error::Usage(format!(
                    "a commit cannot store the deferred update of {name:?}; discard the step"
                )));
            }
        }
        Ok(())
    }
}

impl Shared {
    /// Creates a job that settles a record; `None` if the record is not behind, or other jobs settle it already.
    pub(crate) fn settling(&self, record: usize, urgent: bool) -> Option<Job> {
        let behind = self.deferred.behind(&self.store, record)?;
        let mut state = self.deferred.lock();
        let marks = state.settling.entry(record).or_default();
        {
            let queue = self.queue.lock();
            marks.retain(|mark| queue.holds(mark));
        }
        if !marks.is_empty() {
            return None;
        }
        let count = self.store.layout().chunks_of(record);
        let work = Settle { behind, first: 0, count, into: None, writes: true };
        let job = if urgent { Job::urgent(record, work) } else { Job::new(record, work) };
        marks.push(Arc::clone(&job.mark));
        Some(job)
    }

    /// Creates a job that computes the values of `count` chunks of a record from chunk `first` on, and copies them to
    /// `into`. With `writes`, the job also settles these chunks.
    pub(crate) fn computing(
        &self,
        (record, behind): (usize, Arc<Behind>),
        (first, count): (u32, u32),
        into: Room,
        writes: bool,
    ) -> Job {
        let job = Job::urgent(record, Settle { behind, first, count, into: Some(into), writes });
        if writes {
            self.deferred.lock().settling.entry(record).or_default().push(Arc::clone(&job.mark));
        }
        job
    }

    /// Settles those of `records` that are behind, and waits until they are settled.
    pub(crate) fn settle(&self, records: &[usize], wait: &mut Wait<'_>) -> Result<()> {
        for &record in records {
            while self.deferred.behind(&self.store, record).is_some() {
                if let Some(job) = self.settling(record, true) {
                    self.queue.push_urgent(job)?;
                }
                let marks = self.deferred.lock().settling.get(&record).cloned().unwrap_or_default();
                let ended = |state: &QueueState| !marks.iter().any(|mark| state.holds(mark));
                self.queue.wait(wait, "updates that are settled", ended)?.alive()?;
                marks.iter().try_for_each(|mark| mark.result())?;
            }
        }
        Ok(())
    }
}

/// Returns the error for a fetch of values that a later commit has overwritten.
pub(crate) fn overwritten(store: &Store, record: usize) -> Error {
    let name = &store.description().records[record].name;
    Error::Usage(format!("a later commit overwrote the values of {name:?} in these parts; begin anew"))
}

/// A job that applies a deferred update: settles the record, or only computes the values of some chunks.
pub(crate) struct Settle {
    pub(crate) behind: Arc<Behind>,
    /// The first chunk, and the number of chunks.
    pub(crate) first: u32,
    pub(crate) count: u32,
    /// Where the job copies the values, if anywhere.
    pub(crate) into: Option<Room>,
    /// Whether the job stages the chunks, which settles them.
    pub(crate) writes: bool,
}

impl Settle {
    /// Returns the turn with the index that its chunk has in the record: `turn.index` counts from the job's first
    /// chunk.
    fn turn(&self, turn: &Turn) -> Turn {
        Turn { record: turn.record, index: self.first + turn.index, memory: turn.memory.clone() }
    }

    /// Returns an error if the values differ from an earlier computation of the same chunk.
    fn check(&self, bench: &Workbench<'_>, turn: &Turn, values: &[u8]) -> Result<()> {
        let mut sum = Checksum::default();
        sum.update(values);
        // 0 means "not computed yet".
        let sum = sum.value().max(1);
        let before = self.behind.sums[turn.index as usize].swap(sum, Relaxed);
        if before == 0 || before == sum {
            return Ok(());
        }
        let name = &bench.store.description().records[turn.record].name;
        Err(Error::Usage(format!(
            "chunk {} of the values of {name:?} was computed twice from the same state and gradient, and differs: memory or \
             processor are at fault; the last commit stands",
            turn.index
        )))
    }
}

impl Work for Settle {
    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()> {
        if self.behind.is_over() {
            // A later commit has the settled record, so a job that only settles the record has nothing to do.
            return if self.into.is_some() { Err(overwritten(bench.store, record)) } else { Ok(()) };
        }
        if self.writes { bench.begin_settling(record) } else { Ok(()) }
    }

    fn turns(&self, _bench: &Workbench<'_>, _record: usize) -> u32 {
        if self.behind.is_over() { 0 } else { self.count }
    }

    fn reads<'a>(&self, bench: &Workbench<'a>, turn: &Turn) -> Result<Vec<Read<'a>>> {
        let Turn { record, index: chunk, memory } = self.turn(turn);
        let mut reads = Vec::with_capacity(3);
        if crate::live::are_needed(&bench.store.description().records[record]) {
            let part = bench.part(record, chunk, &memory)?;
            reads.push(Read::Values(bench.store.read_slot(record, chunk, part)?));
        }
        if let Some(state) = bench.state_extent(record, chunk) {
            let part = bench.part(record, state, &memory)?;
            reads.push(Read::State(bench.store.read_slot(record, state, part)?));
        }
        let (part, _) = bench.spill_part(record, chunk, &memory)?;
        reads.push(Read::Gradient(bench.store.read_committed(record, chunk, part)?));
        Ok(reads)
    }

    fn compute(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let turn = self.turn(turn);
        let (gradient, _) = bench.spill_part(turn.record, turn.index, &turn.memory)?;
        applied(bench, &turn, &self.behind.rule, (&gradient, self.behind.dtype))?;
        let values = bench.part(turn.record, turn.index, &turn.memory)?;
        // SAFETY: only this turn uses the chunk now ([Note: a turn owns its staging chunk]).
        let values = unsafe { crate::workbench::bytes_mut(&values) };
        self.check(bench, &turn, values)?;
        if let Some(into) = &self.into {
            into.put(u64::from(turn.index - self.first), values, bench, turn.record);
        }
        Ok(())
    }

    fn writes<'a>(&self, bench: &mut Workbench<'a>, turn: &Turn) -> Result<Vec<Write<'a>>> {
        if !self.writes {
            return Ok(Vec::new());
        }
        let Turn { record, index: chunk, memory } = self.turn(turn);
        if bench.store.is_extent_staged(record, chunk) {
            return Ok(Vec::new());
        }
        bench.stage_chunk(record, chunk, &memory)
    }

    fn counted<'a>(&self, counters: &'a mut Counters) -> Option<&'a mut u64> {
        Some(if self.writes { &mut counters.updates } else { &mut counters.computed })
    }
}
