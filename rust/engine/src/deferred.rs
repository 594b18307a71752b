//! Leaves updates of streamed records to the next step: a commit names their gradients, and later what slots lack is settled.

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

/// The most factors that a deferred update may have: the log keeps each.
const FACTORS_MAX: usize = 16;

/// What a step leaves to the next one.
#[derive(Default)]
pub(crate) struct Deferred(Mutex<State>);

#[derive(Default)]
pub(crate) struct State {
    /// What the step that is made will name: updates by spilled gradients, with their numbers.
    named: BTreeMap<usize, (u64, LoggedRule)>,
    /// What the last commit named.
    behind: BTreeMap<usize, Arc<Behind>>,
    /// The jobs that settle it, each some chunks or all; one that was dropped has come to nothing.
    settling: BTreeMap<usize, Vec<Arc<Mark>>>,
}

/// An update that a commit has made, and that the record's slot lacks.
pub(crate) struct Behind {
    rule: (Taken, Vec<f32>),
    dtype: Dtype,
    /// Checksums of the values of each chunk, once they were computed; 0 before.
    sums: Box<[AtomicU64]>,
    /// Another commit was made since, so that the slot has it, or another record than that one's.
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

    /// The updates that the commit names.
    pub(crate) fn named(&self) -> Vec<(usize, u64, LoggedRule)> {
        self.lock().named.iter().map(|(&record, (step, rule))| (record, *step, rule.clone())).collect()
    }

    /// Forgets updates of the step that is made, of one record alone if one is given.
    pub(crate) fn discard(&self, record: Option<usize>) {
        self.lock().named.retain(|&one, _| record.is_some_and(|record| record != one));
    }

    /// A commit was made: what was behind is settled, and what it named is behind.
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

    /// The update that the slot of a record lacks, if it was not settled.
    pub(crate) fn behind(&self, store: &Store, record: usize) -> Option<Arc<Behind>> {
        self.lock().behind.get(&record).cloned().filter(|_| store.is_behind(record))
    }
}

impl Engine {
    /// Leaves the update of a record by its spilled gradient, multiplied by each factor in turn, to the next step: the commit
    /// names the gradient, and what the slot lacks is settled as late as the commit after it, or as soon as somebody reads
    /// more than the values that [`Engine::fetch`] computes.
    ///
    /// `false` where the update has to be made at once: the record is in RAM, or there is no room for its gradient.
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

    /// Queues what settles a record, if it is behind: after what is queued already.
    pub fn settle_later(&self, record: usize, wait: &mut Wait<'_>) -> Result<()> {
        self.known(record)?;
        match self.shared.settling(record, false) {
            Some(job) => self.push(job, wait),
            None => Ok(()),
        }
    }

    /// How many records the last commit left behind, of those that were not settled.
    #[must_use]
    pub fn behind(&self) -> usize {
        let state = self.shared.deferred.lock();
        state.behind.keys().filter(|&&record| self.shared.store.is_behind(record)).count()
    }

    /// Whether the last commit left anything behind, though it may be settled: before a record of those is staged anew,
    /// that has to be committed.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        !self.shared.deferred.lock().behind.is_empty()
    }

    /// Settles what the last commit left behind, and commits that as a part of the last step; `false` where it left nothing.
    /// Nothing of another step may be staged.
    pub fn catch_up(&self, mut wait: Wait<'_>) -> Result<bool> {
        self.here()?;
        if !self.is_behind() {
            return Ok(false);
        }
        self.settle_rest(&mut wait)?;
        // What fetches of other threads compute with is of one commit.
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

    /// Settles the records that are behind, and waits for that and for all other jobs.
    pub(crate) fn settle_rest(&self, wait: &mut Wait<'_>) -> Result<()> {
        loop {
            let records: Vec<usize> = self.shared.deferred.lock().behind.keys().copied().collect();
            for record in records {
                if let Some(job) = self.shared.settling(record, false) {
                    self.push_of_step(job, wait)?;
                }
            }
            self.shared.queue.wait(wait, "records to be written", QueueState::is_idle)?.failure()?;
            // What was on its way may have been some chunks of a record alone, or have come to nothing.
            if self.behind() == 0 {
                return Ok(());
            }
        }
    }

    /// Has the step name the spilled gradients of what it defers. One that lies where it cannot be named is spilled again.
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
                return Err(Error::Usage(format!("the gradient of {name:?} cannot be named by a commit; discard it")));
            }
        }
        Ok(())
    }
}

impl Shared {
    /// A job that settles a record; `None` where it is not behind, or others do it.
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

    /// A job that computes values of some chunks of a record, and copies them somewhere; it settles these, too, if it is to
    /// write them.
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

    /// Settles those of some records that are behind, and waits for that.
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

/// Values of a commit are asked for, and another one was made.
pub(crate) fn overwritten(store: &Store, record: usize) -> Error {
    let name = &store.description().records[record].name;
    Error::Usage(format!("the values of {name:?} that these parts are of are overwritten now; begin anew"))
}

/// Applies the update that a record lacks: writes the record whole, or computes values of some chunks alone.
pub(crate) struct Settle {
    pub(crate) behind: Arc<Behind>,
    /// The first of its chunks, and how many.
    pub(crate) first: u32,
    pub(crate) count: u32,
    /// Where their values go.
    pub(crate) into: Option<Room>,
    /// All of the record is written.
    pub(crate) writes: bool,
}

impl Settle {
    fn turn(&self, turn: &Turn) -> Turn {
        Turn { record: turn.record, index: self.first + turn.index, memory: turn.memory.clone() }
    }

    /// That values which are computed more than once are the same.
    fn check(&self, bench: &Workbench<'_>, turn: &Turn, values: &[u8]) -> Result<()> {
        let mut sum = Checksum::default();
        sum.update(values);
        // 0 says that there is none.
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
            // Others waited for no more than that it is settled, and it is.
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
        // SAFETY: nothing is in flight of this chunk, which is this turn's.
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
