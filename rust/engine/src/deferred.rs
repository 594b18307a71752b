//! Defers updates of streamed records: computes and writes these updates after the commit of their step.
//!
//! [Note: deferred updates] A commit may name a record's spilled gradient, instead of a slot with the updated record.
//! The record is then *behind*: its slot still holds the record before this one update. A [`Settle`] job *settles* the
//! record: it reads the slot and the gradient, computes the update, and stages the updated record. This happens before
//! the next commit at the latest. Until then, `Engine::fetch` computes the record's values from the slot and the
//! gradient. A discard keeps the named gradient and the settled record, because both belong to the last commit.

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

/// The largest number of factors of a deferred update. The number is bounded because the log stores each factor.
const FACTORS_MAX: usize = 16;

/// The deferred updates of an engine; see [Note: deferred updates].
#[derive(Default)]
pub(crate) struct Deferred(Mutex<State>);

#[derive(Default)]
pub(crate) struct State {
    /// The deferred updates that the next commit will name: for each record, the number of the update and its rule.
    named: BTreeMap<usize, (u64, LoggedRule)>,
    /// The deferred updates that the last commit named, by record.
    behind: BTreeMap<usize, Arc<Behind>>,
    /// For each record, the marks of the jobs that settle the record. A job settles some chunks of the record, or all
    /// chunks. Some of these jobs may have ended, or the queue may have dropped them.
    settling: BTreeMap<usize, Vec<Arc<Mark>>>,
}

/// A deferred update that a commit named. The record's slot does not contain this update until the record is settled.
pub(crate) struct Behind {
    rule: (Taken, Vec<f32>),
    dtype: Dtype,
    /// The checksum of each chunk's updated values. It is 0 until a job has computed the values of the chunk.
    sums: Box<[AtomicU64]>,
    /// True once a later commit contains this update. From then on, the slot that holds the record before this update
    /// may be overwritten.
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

    /// Returns the record, the number and the rule of each deferred update that the next commit will name.
    pub(crate) fn named(&self) -> Vec<(usize, u64, LoggedRule)> {
        self.lock().named.iter().map(|(&record, (step, rule))| (record, *step, rule.clone())).collect()
    }

    /// Forgets the deferred updates that the next commit would name. If `record` is given, forgets only the update of
    /// this record.
    pub(crate) fn discard(&self, record: Option<usize>) {
        self.lock().named.retain(|&one, _| record.is_some_and(|record| record != one));
    }

    /// Call this function after a commit. The function sets `over` of each update that the previous commit named. It
    /// moves each update that this commit named from `named` to `behind`.
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

    /// Returns the deferred update that the record's slot does not contain yet. Returns `None` if the record has no
    /// deferred update or is settled.
    pub(crate) fn behind(&self, store: &Store, record: usize) -> Option<Arc<Behind>> {
        self.lock().behind.get(&record).cloned().filter(|_| store.is_behind(record))
    }
}

impl Engine {
    /// Defers the update of a record to the next step. The update multiplies the spilled gradient of the record by each
    /// factor, one after the other, and applies the product. The commit of the present step names the gradient. The
    /// engine settles the record before the commit of the next step. It settles the record earlier if a reader needs
    /// more than the values that [`Engine::fetch`] computes.
    ///
    /// Returns `false` if the update cannot be deferred, for one of these reasons: the record is in RAM, it has no
    /// second place for its gradient, its spilled gradients are not float32, bfloat16 or float16, it has state that is
    /// not cut into chunks, or there are more than 16 factors.
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
                return Err(Error::Usage(format!(
                    "an update of {name:?} is staged already; commit or discard the step first"
                )));
            }
        }
        Ok(true)
    }

    /// Queues a job that settles a record, if the record has a deferred update and no other job settles the record. The
    /// job runs after the jobs that are in the queue already.
    pub fn settle_later(&self, record: usize, wait: &mut Wait<'_>) -> Result<()> {
        self.known(record)?;
        match self.shared.settling(record, false) {
            Some(job) => self.push(job, wait),
            None => Ok(()),
        }
    }

    /// Returns the number of records with a deferred update that is not settled yet.
    #[must_use]
    pub fn behind(&self) -> usize {
        let state = self.shared.deferred.lock();
        state.behind.keys().filter(|&&record| self.shared.store.is_behind(record)).count()
    }

    /// True if the last commit deferred an update, even if a job has settled the record since then.
    /// [`Engine::catch_up`] must commit the settled record before a new step stages the record.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        !self.shared.deferred.lock().behind.is_empty()
    }

    /// Settles all records with a deferred update, and commits the settled records as a part of the last step. Returns
    /// `false` if the last commit deferred no update. Call this function only while no step is staged.
    pub fn catch_up(&self, mut wait: Wait<'_>) -> Result<bool> {
        self.here()?;
        if !self.is_behind() {
            return Ok(false);
        }
        self.settle_rest(&mut wait)?;
        // Hold back urgent jobs during the commit: a fetch on another thread must not mix the data of two commits.
        let _pause = self.shared.queue.paused(&mut wait, "deferred updates", QueueState::is_idle)?;
        self.shared.queue.lock().failure()?;
        let store = &self.shared.store;
        if store.is_staging() || self.ram_tier.has_waiting() || !self.shared.deferred.named().is_empty() {
            return Err(Error::Usage("a step is staged; commit or discard this step first".into()));
        }
        store.commit(Commit { step: store.info().step, ..Commit::default() }, wait)?;
        self.shared.deferred.committed(store)?;
        Ok(true)
    }

    /// Settles all records with a deferred update. Returns after all of these records are settled and all other jobs
    /// have ended.
    pub(crate) fn settle_rest(&self, wait: &mut Wait<'_>) -> Result<()> {
        loop {
            let records: Vec<usize> = self.shared.deferred.lock().behind.keys().copied().collect();
            for record in records {
                if let Some(job) = self.shared.settling(record, false) {
                    self.push_of_step(job, wait)?;
                }
            }
            self.shared.queue.wait(wait, "records to be written", QueueState::is_idle)?.failure()?;
            // Try again if a job settled only some chunks of a record, or was dropped.
            if self.behind() == 0 {
                return Ok(());
            }
        }
    }

    /// Makes the commit of this step name the spilled gradients of the deferred updates. If the commit cannot name the
    /// place where a gradient is now, this function first copies the gradient to the other place of its record.
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
    /// Creates a job that settles a record. Returns `None` if the record has no deferred update, or if other jobs are
    /// settling the record already.
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

    /// Creates a job for `count` chunks of a record, beginning with chunk `first`. The job computes the updated values
    /// of these chunks, and copies the values to `into`. If `writes` is true, the job also settles these chunks.
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

    /// Settles each record in `records` that has a deferred update, and waits until all of these records are settled.
    pub(crate) fn settle(&self, records: &[usize], wait: &mut Wait<'_>) -> Result<()> {
        for &record in records {
            while self.deferred.behind(&self.store, record).is_some() {
                if let Some(job) = self.settling(record, true) {
                    self.queue.push_urgent(job)?;
                }
                let marks = self.deferred.lock().settling.get(&record).cloned().unwrap_or_default();
                let ended = |state: &QueueState| !marks.iter().any(|mark| state.holds(mark));
                self.queue.wait(wait, "deferred updates", ended)?.alive()?;
                marks.iter().try_for_each(|mark| mark.result())?;
            }
        }
        Ok(())
    }
}

/// Returns the error for a fetch of values that a later commit has overwritten.
pub(crate) fn overwritten(store: &Store, record: usize) -> Error {
    let name = &store.description().records[record].name;
    Error::Usage(format!(
        "a later commit overwrote the values of {name:?} before they were fetched: begin the read again"
    ))
}

/// A job that applies a deferred update to some chunks of a record, or to all chunks. It either settles these chunks or
/// only computes their values.
pub(crate) struct Settle {
    pub(crate) behind: Arc<Behind>,
    /// The job handles `count` chunks of the record, beginning with chunk `first`.
    pub(crate) first: u32,
    pub(crate) count: u32,
    /// The memory to which the job copies the updated values. With `None`, the job does not copy the values.
    pub(crate) into: Option<Room>,
    /// True if the job settles the chunks: it stages their updated values and state.
    pub(crate) writes: bool,
}

impl Settle {
    /// Returns a copy of `turn` whose index counts from the first chunk of the record. The index of `turn` counts from
    /// the first chunk of the job.
    fn turn(&self, turn: &Turn) -> Turn {
        Turn { record: turn.record, index: self.first + turn.index, memory: turn.memory.clone() }
    }

    /// Returns an error if the values differ from the values that an earlier job computed for the same chunk.
    fn check(&self, bench: &Workbench<'_>, turn: &Turn, values: &[u8]) -> Result<()> {
        let mut sum = Checksum::default();
        sum.update(values);
        // Replace a checksum of 0 by 1, because 0 stands for values that no job has computed yet.
        let sum = sum.value().max(1);
        let before = self.behind.sums[turn.index as usize].swap(sum, Relaxed);
        if before == 0 || before == sum {
            return Ok(());
        }
        let name = &bench.store.description().records[turn.record].name;
        Err(Error::Usage(format!(
            "the values of chunk {} of {name:?} were computed twice from the same state and gradient, and the results \
             differ: the memory or the processor of this machine may be faulty. Check the machine, then resume from \
             the last commit",
            turn.index
        )))
    }
}

impl Work for Settle {
    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()> {
        if self.behind.is_over() {
            // A later commit contains the updated record, so the job has nothing to do. A caller that waits for values
            // of the earlier commit gets an error.
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
