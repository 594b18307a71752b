//! Owns the pipeline's thread and memory, and takes jobs from callers.

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
    error::catch_panic,
    fill::Fill,
    job::Job,
    live::Live,
    pipeline::{CHUNKS_DEFAULT, Pipeline, lose_spilled},
    queue::Queue,
    ram_tier::{RamTierGradients, Waiting},
    spill::{Forget, Spill, Unspill, nothing, spill_dtype},
    turn::Leaves,
    update::{GradientSource, KernelUpdate},
    workbench::{Parts, Workbench},
};

/// The minimum of staging chunks: the pipeline reads one while it writes another.
const CHUNKS_MIN: usize = 2;
/// The maximum of staging chunks. Some drives need more than the default; no drive gained from more than this.
const CHUNKS_MAX: usize = 64;

/// The options of an engine.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Options {
    /// Number of staging chunks.
    pub chunks: usize,
    /// Bytes of gradients that the queue may hold. A larger gradient waits until the queue is empty.
    pub queue_bytes_max: usize,
    /// Bytes of memory for one whole record, for functions that get the whole record.
    pub whole_bytes: usize,
    /// Bytes of memory for a second whole record, which the pipeline reads or writes while a function computes on the
    /// first; at most `whole_bytes`. A larger record waits until the first record's memory is free; with 0, every
    /// record does.
    pub whole_next_bytes: usize,
    /// Number of threads that apply updates to records in RAM after a commit.
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

/// Updates the records of a store. The crate's description gives an overview.
pub struct Engine {
    pub(crate) shared: Arc<Shared>,
    pub(crate) ram_tier: RamTierGradients,
    thread: Mutex<Option<JoinHandle<()>>>,
    staging_bytes: usize,
    whole_bytes: usize,
    pub(crate) threads: NonZeroUsize,
    /// The process that created the engine.
    maker: Maker,
}

pub(crate) struct Shared {
    pub(crate) store: Arc<Store>,
    pub(crate) queue: Queue,
    /// The staging chunks; `chunks` is their number.
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

    /// Queues a job that writes the first values of a record, and sets the record's count of updates to `first.step`.
    /// The job reads nothing from storage.
    ///
    /// Returns once the queue has room for the tensors. The job holds the tensors until it has written them.
    pub fn fill(&self, record: usize, first: First, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        let fill = Fill::new(&self.shared.store, record, first)?;
        self.shared.queue.push(Job::new(record, fill), &mut wait)
    }

    /// Queues update number `rule.step()` of a record by its gradient.
    ///
    /// `values` are the record's values as the last commit left them. If the update computes with the record's values,
    /// it takes them from `values` instead of reading them from storage. The job holds `values` as long as the
    /// gradient; `values` do not count towards the queue's bound.
    ///
    /// Returns once the queue has room for the gradient. The job holds the gradient until it has used it.
    pub fn update(
        &self,
        record: usize,
        source: GradientSource,
        values: Option<Box<dyn Buffer>>,
        rule: impl Into<Rule>,
        mut wait: Wait<'_>,
    ) -> Result<()> {
        let described = self.known(record)?;
        let spilled = matches!(source, GradientSource::Spilled(_));
        if let GradientSource::Given(gradient) = &source
            && gradient.elements() != described.elements()
        {
            let (name, got, wanted) = (&described.name, gradient.elements(), described.elements());
            return Err(Error::Invalid(format!("the gradient of {name:?} has {got} elements, not {wanted}")));
        }
        let rule = rule.into();
        let ram_tier = self.shared.store.is_in_ram(record);
        // A record in RAM does not need `values`: `Workers::check` verifies the values in the RAM tier in place.
        let values = values.filter(|_| !ram_tier);
        if ram_tier && matches!(&source, GradientSource::Given(gradient) if !gradient.is_here()) {
            return Err(Error::Invalid("the gradient of a record in RAM must be in host memory".into()));
        }
        let update = KernelUpdate::new(&self.shared.store, record, source, values, rule)?;
        if spilled {
            self.will_be_spilled(record)?;
        }
        if ram_tier {
            let update = update.by_kept(self.ram_tier.kept(record).filter(|_| spilled));
            return self.wait_to_update(record, rule.step(), update, &mut wait);
        }
        self.shared.queue.push(Job::new(record, update), &mut wait)
    }

    /// Queues the update of a record that is not in RAM, and spills its gradient in the same turns. The result is the
    /// same as that of [`Engine::spill`] followed by an update by the spilled gradient. But the update does not read
    /// the gradient from storage, and memory holds the gradient once.
    ///
    /// If the job fails, or is discarded before it ends, no spilled gradient remains. After the job has ended, a
    /// discard drops the update and keeps the spilled gradient.
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
        let update = KernelUpdate::new(store, record, GradientSource::Spilled(Vec::new()), values, rule.into())?;
        let update = update.spilling(Spill::new(store, record, gradient, false)?);
        self.shared.queue.push(Job::new(record, update), &mut wait)
    }

    /// Queues a job that spills a gradient to the record's place for a spilled gradient. With `add`, the job adds the
    /// gradient to the spilled gradient: it computes in fp32 (float64 gradients: in float64), and rounds the sum once,
    /// to the spilled gradient's dtype.
    ///
    /// Returns as [`Engine::update`] does. A spilled gradient is not part of a step: a commit does not remove it, and
    /// opening the store again forgets it. If the job is discarded or fails, no gradient remains in the place.
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

    /// Waits for the jobs of a record, and returns the check (finite or not, sum of squares) of its spilled gradient.
    pub fn spilled(&self, record: usize, mut wait: Wait<'_>) -> Result<Check> {
        self.known(record)?;
        if let Some(kept) = self.ram_tier.kept(record) {
            return Ok(kept.spilled);
        }
        self.shared.queue.wait(&mut wait, "work on the gradient", |state| !state.has(record))?.failure()?;
        let spilled = self.shared.store.spilled(record)?;
        spilled.ok_or_else(|| nothing(&self.shared.store, record))
    }

    /// Reads a spilled gradient into `into`, after the jobs of the record that are queued already. Nothing else may use
    /// the memory of `into` meanwhile.
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

    /// Forgets the spilled gradient of a record, after the jobs of the record that are queued already.
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

    /// Queues the application of a function to a record: one chunk after the other, or the whole record at once.
    ///
    /// Returns as [`Engine::update`] does; `values` have the same meaning. State that is not cut into chunks is read
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

    /// Returns an error if the record has no spilled gradient and no queued job that will spill one.
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
        // If an error of this step lost the gradient, return that error instead.
        self.shared.queue.lock().failure()?;
        Err(nothing(&self.shared.store, record))
    }

    /// Returns an error in a forked child. The child has none of the engine's threads; waiting for a lock that one of
    /// them held would never end.
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

    /// Returns the store that the engine updates.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.shared.store
    }

    /// Returns the bytes of the staging chunks and of the memory for functions: all memory that the engine holds,
    /// except tensors in its queue.
    #[must_use]
    pub fn staging_bytes(&self) -> usize {
        self.staging_bytes
    }

    /// Returns the bytes of callers' tensors in queued and running jobs.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.shared.queue.lock().queued_bytes
    }

    /// Returns the engine's counters.
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

    /// Drops queued jobs, drains running jobs and ends the thread. Uncommitted updates are lost. A second call does
    /// nothing; neither does a call in a forked child.
    pub fn close(&self) {
        if self.here().is_err() {
            return;
        }
        self.shared.queue.lock().closing = true;
        self.cancel(None);
        let thread = locked(&self.thread).take();
        // A function may close the engine that runs it. A thread cannot join itself, so it is not joined here: it ends
        // after the function has returned.
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
        // If this panics, unwinding drops the reads and writes in flight, and each drop waits for its devices. So the
        // kernel never accesses freed memory.
        let served = catch_panic(|| {
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
        // Dropping the jobs drops the callers' buffers, and the drop of a buffer may panic, too. So `notify` has woken
        // all waiters before.
        drop(caught(|| drop(dropped)));
    }
}

#[cfg(test)]
#[path = "../tests/inside/panics.rs"]
mod panics;
