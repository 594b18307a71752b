//! The engine: owns the pipeline's thread and memory, and takes jobs from callers.

use std::{
    num::NonZeroUsize,
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

use memascend_math::{Check, Rule};
use memascend_mem::{Maker, Wait, caught, locked};
use memascend_store::{Buffer, Scratch, Store};

use crate::{
    Counters, Error, First, Gradient, Result,
    apply::{self, Application, Apply},
    caller::Caller,
    deferred::Deferred,
    error::contained,
    fill::Fill,
    job::Job,
    live::Live,
    pipeline::{CHUNKS_DEFAULT, Pipeline, lose_spilled},
    queue::Queue,
    ram_tier::{RamTierGradients, Waiting},
    spill::{Forget, Spill, Unspill, nothing, spill_dtype},
    turn::Leaves,
    update::{By, KernelUpdate},
    workbench::{Parts, Workbench},
};

/// The fewest staging chunks: one is read while another is written.
const CHUNKS_MIN: usize = 2;
/// The most. Real drives may want more than the default; past this nothing was ever gained.
const CHUNKS_MAX: usize = 64;

/// How an engine works.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Options {
    /// Staging chunks.
    pub chunks: usize,
    /// Bytes of gradients that may wait. One larger gradient is let in alone.
    pub queue_bytes_max: usize,
    /// Bytes for a record in one piece, for functions that are applied to it whole.
    pub whole_bytes: usize,
    /// Bytes for a second such record, which is read, or written, while the function of another computes; at most as many.
    /// One that does not fit waits for the memory of the first, as all do without.
    pub whole_next_bytes: usize,
    /// Threads that updates of records in RAM run on at the end of a step.
    pub threads: NonZeroUsize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            chunks: CHUNKS_DEFAULT,
            queue_bytes_max: 256 << 20,
            whole_bytes: 0,
            whole_next_bytes: 0,
            threads: NonZeroUsize::MIN,
        }
    }
}

/// Updates of a store. See the crate's description.
pub struct Engine {
    pub(crate) shared: Arc<Shared>,
    pub(crate) ram_tier: RamTierGradients,
    thread: Mutex<Option<JoinHandle<()>>>,
    staging_bytes: usize,
    whole_bytes: usize,
    pub(crate) threads: NonZeroUsize,
    /// The process that it works in.
    maker: Maker,
}

pub(crate) struct Shared {
    pub(crate) store: Arc<Store>,
    pub(crate) queue: Queue,
    /// The staging chunks, and how many there are.
    pub(crate) staging: Scratch,
    pub(crate) chunks: usize,
    pub(crate) deferred: Deferred,
}

impl Engine {
    /// Starts an engine on a store.
    pub fn new(store: Arc<Store>, options: &Options) -> Result<Self> {
        let chunks = options.chunks;
        if !(CHUNKS_MIN..=CHUNKS_MAX).contains(&chunks) {
            return Err(Error::Invalid(format!("{chunks} staging chunks: {CHUNKS_MIN} to {CHUNKS_MAX} work")));
        }
        let chunk_bytes = Parts::new(store.description()).bytes();
        let staging = Scratch::new(chunk_bytes, chunks, "update staging")?;
        crate::apply_logs(&store);
        let others = apply::others(store.description())?;
        let wholes = apply::wholes(options.whole_bytes, options.whole_next_bytes)?;
        let staging_bytes = [&staging].into_iter().chain(&others).chain(&wholes).map(|room| room.mapped).sum();
        let (queue, deferred) = (Queue::new(options.queue_bytes_max), Deferred::default());
        let shared = Arc::new(Shared { store, queue, staging, chunks, deferred });
        let weak = Arc::downgrade(&shared);
        shared.store.settle_with(Box::new(move |records| {
            let shared = weak.upgrade();
            shared.map_or(Ok(()), |shared| shared.settle(records, &mut Wait::forever()).map_err(Error::of_store))
        }));
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("memascend-update".into())
            .spawn(move || theirs.serve(others, wholes))
            .map_err(|error| Error::Invalid(format!("no thread could be started: {error}")))?;
        let (ram_tier, thread) = (RamTierGradients::default(), Mutex::new(Some(thread)));
        let (whole_bytes, threads, maker) = (options.whole_bytes, options.threads, Maker::here());
        Ok(Self { shared, ram_tier, thread, staging_bytes, whole_bytes, threads, maker })
    }

    /// Begins the first values of a record, whose update number is then 0. Nothing is read.
    ///
    /// Returns at once, or when so many bytes of tensors no longer wait. The tensors are held until they were used.
    pub fn fill(&self, record: usize, first: First, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        let fill = Fill::new(&self.shared.store, record, first)?;
        self.shared.queue.push(Job::new(record, fill), &mut wait)
    }

    /// Begins the update of a record by its gradient, as update number `rule.step()`.
    ///
    /// Where the update starts from the record's `values` and these are given, as the last commit left them, they are not
    /// read. They are held as long as the gradient, and not counted in the queue.
    ///
    /// Returns at once, or when so many bytes of gradients no longer wait. The gradient is held until it has been used.
    pub fn update(
        &self,
        record: usize,
        by: By,
        values: Option<Box<dyn Buffer>>,
        rule: impl Into<Rule>,
        mut wait: Wait<'_>,
    ) -> Result<()> {
        let described = self.known(record)?;
        let spilled = matches!(by, By::Spilled(_));
        if let By::Given(gradient) = &by
            && gradient.elements() != described.elements()
        {
            let (name, got, wanted) = (&described.name, gradient.elements(), described.elements());
            return Err(Error::Invalid(format!("the gradient of {name:?} has {got} elements, not {wanted}")));
        }
        let rule = rule.into();
        let ram_tier = self.shared.store.is_in_ram(record);
        // What is in RAM is checked where it lies.
        let values = values.filter(|_| !ram_tier);
        if ram_tier && matches!(&by, By::Given(gradient) if !gradient.is_here()) {
            return Err(Error::Invalid("a gradient of a record in RAM lies in host memory".into()));
        }
        let update = KernelUpdate::new(&self.shared.store, record, by, values, rule)?;
        if spilled {
            self.will_be_spilled(record)?;
        }
        if ram_tier {
            let update = update.by_kept(self.ram_tier.kept(record).filter(|_| spilled));
            return self.wait_to_update(record, rule.step(), update, &mut wait);
        }
        self.shared.queue.push(Job::new(record, update), &mut wait)
    }

    /// Begins the update of a record that is not in RAM by its gradient, which is spilled in the same turns: as
    /// [`Engine::spill`] and an update by what that left, but nothing is read of it, and it is in memory once.
    ///
    /// Where the job is discarded or fails, no gradient is left; where it has ended, discarding the update leaves it.
    pub fn update_spilling(
        &self,
        record: usize,
        gradient: Gradient,
        values: Option<Box<dyn Buffer>>,
        rule: impl Into<Rule>,
        mut wait: Wait<'_>,
    ) -> Result<()> {
        let described = self.known(record)?;
        let store = &self.shared.store;
        if store.is_in_ram(record) {
            let name = &described.name;
            return Err(Error::Invalid(format!(
                "{name:?} is in RAM: its update waits for the step, and its gradient with it"
            )));
        }
        let update = KernelUpdate::new(store, record, By::Spilled(Vec::new()), values, rule.into())?;
        let update = update.spilling(Spill::new(store, record, gradient, false)?);
        self.shared.queue.push(Job::new(record, update), &mut wait)
    }

    /// Begins to write a gradient to the room that its record has for it; or to add it to what lies there, in its dtype,
    /// computed in fp32 and rounded once.
    ///
    /// Returns as [`Engine::update`] does. What is spilled is no part of a step: a commit leaves it, and nothing of it is
    /// known once the store is opened again. A job of this kind that is discarded or fails leaves nothing there.
    pub fn spill(&self, record: usize, gradient: Gradient, add: bool, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        if add {
            self.will_be_spilled(record)?;
        }
        if self.shared.store.is_in_ram(record) {
            Spill::require_fit(&self.shared.store, record, &gradient)?;
            return self.ram_tier.keep(&self.shared.store, record, &gradient, add);
        }
        let spill = Spill::new(&self.shared.store, record, gradient, add)?;
        self.shared.queue.push(Job::new(record, spill), &mut wait)
    }

    /// Waits for the jobs of a record, and says what is spilled of it.
    pub fn spilled(&self, record: usize, mut wait: Wait<'_>) -> Result<Check> {
        self.known(record)?;
        if let Some(kept) = self.ram_tier.kept(record) {
            return Ok(kept.spilled);
        }
        self.shared.queue.wait(&mut wait, "work on the gradient", |state| !state.has(record))?.failure()?;
        let spilled = self.shared.store.spilled(record)?;
        spilled.ok_or_else(|| nothing(&self.shared.store, record))
    }

    /// Reads a spilled gradient into memory that nobody else uses meanwhile, after the jobs that were begun before.
    pub fn read_spilled(&self, record: usize, mut into: Box<dyn Buffer>, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        if let Some(kept) = self.ram_tier.kept(record) {
            return kept.read(&self.shared.store, record, &mut *into);
        }
        let unspill = Unspill::new(&self.shared.store, record, into)?;
        self.will_be_spilled(record)?;
        let job = Job::new(record, unspill);
        let mark = Arc::clone(&job.mark);
        self.shared.queue.push(job, &mut wait)?;
        let mut state = self.shared.queue.wait(&mut wait, "a spilled gradient", |state| !state.holds(&mark))?;
        if mark.is_completed() {
            return Ok(());
        }
        state.failure()?;
        Err(Error::Usage("the read of a spilled gradient was discarded".into()))
    }

    /// Forgets what is spilled of a record, after the jobs that were begun before.
    pub fn drop_spilled(&self, record: usize, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        self.ram_tier.forget(record);
        let waits = self.shared.queue.lock().has(record);
        if waits {
            spill_dtype(&self.shared.store, record)?;
            return self.shared.queue.push(Job::new(record, Forget), &mut wait);
        }
        Ok(self.shared.store.set_spilled(record, None)?)
    }

    /// Begins to apply a function to a record: to a chunk after the other, or to all of it at once.
    ///
    /// Returns as [`Engine::update`] does, whose `values` these are, too. State of another shape than the record's is read
    /// before the first call and staged after the last.
    pub fn apply(
        &self,
        record: usize,
        application: Application,
        values: Option<Box<dyn Buffer>>,
        mut wait: Wait<'_>,
    ) -> Result<()> {
        self.known(record)?;
        let Application { spilled, step, after_commit, .. } = application;
        let apply = Apply::new(&self.shared.store, record, application, self.whole_bytes)?;
        if spilled {
            self.will_be_spilled(record)?;
        }
        if self.shared.store.is_in_ram(record) {
            let apply = apply.by_kept(self.ram_tier.kept(record).filter(|_| spilled));
            let applies = after_commit && self.shared.store.applies();
            let work = Box::new(if applies { apply.in_memory() } else { apply });
            return self.wait_for_step(Waiting { record, step, work, applies, rule: None });
        }
        let live = values.map(|values| Live::new(&self.shared.store, record, values)).transpose()?.flatten();
        self.shared.queue.push(Job::new(record, apply.on_live(live)), &mut wait)
    }

    /// Refuses what needs a spilled gradient where there is none, nor one on its way.
    pub(crate) fn will_be_spilled(&self, record: usize) -> Result<()> {
        if self.ram_tier.kept(record).is_some() {
            return Ok(());
        }
        let leaves = self.shared.queue.lock().leaves(record);
        let there = match leaves {
            Leaves::Same => self.shared.store.spilled(record)?.is_some(),
            Leaves::Gradient => true,
            Leaves::Nothing => false,
        };
        if there {
            return Ok(());
        }
        // Where an error of this step lost it, that is what is to be told.
        self.shared.queue.lock().failure()?;
        Err(nothing(&self.shared.store, record))
    }

    /// Refuses in a forked child, which has none of the threads, before a lock that one of them held is waited for.
    pub(crate) fn here(&self) -> Result<()> {
        if self.maker.is_elsewhere() {
            let why = "this engine belongs to the process that made it, and this process is a fork of it: update there";
            return Err(Error::Usage(why.into()));
        }
        Ok(())
    }

    pub(crate) fn known(&self, record: usize) -> Result<&memascend_store::Record> {
        self.here()?;
        let records = &self.shared.store.description().records;
        records.get(record).ok_or_else(|| Error::Invalid(format!("record {record} of {}", records.len())))
    }

    /// What it works on.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.shared.store
    }

    /// Bytes of its staging chunks, and of the memory for functions: all that it holds beside the tensors in its queue.
    #[must_use]
    pub fn staging_bytes(&self) -> usize {
        self.staging_bytes
    }

    /// Bytes of callers' tensors that wait or are being used now.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.shared.queue.lock().queued_bytes
    }

    /// What it has done.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let (waiting, waiting_peak) = {
            let ram_tier = self.ram_tier.lock();
            (ram_tier.bytes() as u64, ram_tier.peak() as u64)
        };
        let state = self.shared.queue.lock();
        let Counters { updates, chunks, idle, applying, unlogged, queued_peak, .. } = state.counters;
        let piped = state.piped;
        Counters {
            updates: piped.updates + updates,
            chunks: piped.chunks + chunks,
            queued: state.queued_bytes as u64,
            queued_peak,
            waiting,
            waiting_peak,
            unlogged,
            applying,
            idle,
            ..piped
        }
    }

    /// Drops what waits, drains what is in flight and ends the thread. What was not committed is lost. Twice is fine.
    /// Nothing in a forked child.
    pub fn close(&self) {
        if self.here().is_err() {
            return;
        }
        self.shared.queue.lock().closing = true;
        self.cancel(None);
        let thread = locked(&self.thread).take();
        // A function on the engine's own thread cannot wait for it; the thread ends after it.
        if let Some(thread) = thread.filter(|_| !self.shared.queue.is_worker()) {
            drop(thread.join());
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn serve(&self, others: Option<Scratch>, wholes: Vec<Scratch>) {
        self.queue.work_here();
        // Unwinding drops what is in flight, which waits for the devices: no memory goes that the kernel still has.
        let served = contained(|| {
            let bench = Workbench::new(&self.store, others, wholes)?;
            let caller = Caller::default();
            Pipeline::new(&self.queue, &self.staging, bench, caller, self.chunks).serve();
            Ok(())
        });
        let Err(error) = served else { return };
        let (dropped, marks) = self.queue.lock().end_by(error);
        for mark in &marks {
            lose_spilled(&self.store, mark);
        }
        self.queue.notify();
        // A caller's memory is let go by what may panic, too; whoever waits has been told before.
        drop(caught(|| drop(dropped)));
    }
}

#[cfg(test)]
#[path = "../tests/inside/panics.rs"]
mod panics;
