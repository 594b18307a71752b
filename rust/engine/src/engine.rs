//! Defines the engine. The engine owns the pipeline's thread and memory, and queues jobs for its callers.

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

/// The smallest number of staging chunks: the pipeline reads one chunk while it writes the other chunk.
const CHUNKS_MIN: usize = 2;
/// The largest number of staging chunks. Some drives need more chunks than the default. No drive that was measured
/// became faster with more than 64 chunks.
const CHUNKS_MAX: usize = 64;

/// The options of an engine.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Options {
    /// Number of staging chunks.
    pub chunks: usize,
    /// The largest number of bytes of callers' tensors, such as gradients, in queued and running jobs. A job with more
    /// bytes waits until no other job has such tensors.
    pub queue_bytes_max: usize,
    /// Bytes of memory for one whole record. The engine needs this memory to call functions that get whole records.
    pub whole_bytes: usize,
    /// Bytes of memory for a second whole record, at most `whole_bytes`. The pipeline reads or writes this second
    /// record while a function computes on the first record. A second record that is larger than this memory waits for
    /// the memory of the first record.
    pub whole_next_bytes: usize,
    /// Number of threads that apply updates to records in RAM after a commit, but at most `chunks` threads.
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
    /// The memory of the staging chunks. `chunks` is the number of staging chunks.
    pub(crate) staging: Scratch,
    pub(crate) chunks: usize,
    pub(crate) deferred: Deferred,
}

impl Engine {
    /// Starts an engine on a store.
    pub fn new(store: Arc<Store>, options: &Options) -> Result<Self> {
        let chunks = options.chunks;
        if !(CHUNKS_MIN..=CHUNKS_MAX).contains(&chunks) {
            return Err(Error::Invalid(format!(
                "an engine cannot have {chunks} staging chunks: choose {CHUNKS_MIN} to {CHUNKS_MAX}"
            )));
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
            .map_err(|error| Error::Invalid(format!("could not start a thread ({error}): check ulimit -u")))?;
        let (ram_tier, thread) = (RamTierGradients::default(), Mutex::new(Some(thread)));
        let (whole_bytes, threads, maker) = (options.whole_bytes, options.threads, Maker::here());
        Ok(Self { shared, ram_tier, thread, staging_bytes, whole_bytes, threads, maker })
    }

    /// Queues a job that writes the first values of a record. The job also sets the record's count of updates to
    /// `first.step`. It reads nothing from storage.
    ///
    /// Returns once the queue has room for the tensors in `first`. The job holds these tensors until it has copied
    /// them to staging chunks.
    pub fn fill(&self, record: usize, first: First, mut wait: Wait<'_>) -> Result<()> {
        self.known(record)?;
        let fill = Fill::new(&self.shared.store, record, first)?;
        self.shared.queue.push(Job::new(record, fill), &mut wait)
    }

    /// Queues an update of a record. `source` gives the gradient. The update has the number `rule.step()`.
    ///
    /// `values` are the record's values after the last commit. If the update computes with the record's values, it
    /// copies `values` instead of reading storage. The job holds `values` as long as it holds the gradient. The bytes
    /// of `values` do not count towards the queue's bound.
    ///
    /// Returns once the queue has room for the gradient. The job holds the gradient until the update is computed.
    ///
    /// An update of a record in RAM waits for [`Engine::finish`] or [`Engine::commit`] instead, because the model still
    /// computes with the record. It drops `values`.
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
            return Err(Error::Invalid(format!(
                "the gradient of {name:?} has {got} elements, not {wanted}: pass the gradient of the whole record"
            )));
        }
        let rule = rule.into();
        let ram_tier = self.shared.store.is_in_ram(record);
        // An update of a record in RAM uses the values in the RAM tier, which `Workers::check` verifies. So drop
        // `values`.
        let values = values.filter(|_| !ram_tier);
        if ram_tier && matches!(&source, GradientSource::Given(gradient) if !gradient.is_here()) {
            return Err(Error::Invalid(
                "the gradient of a record in RAM must be in host memory: copy the gradient to host memory first".into(),
            ));
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

    /// Queues the update of a record that is not in RAM. The same job spills the gradient of the record. The result is
    /// the same as that of two calls: [`Engine::spill`], then [`Engine::update`] with the spilled gradient. But this
    /// job does not read the gradient back from storage, and the gradient is in memory only once.
    ///
    /// If the job fails, or is discarded before it ends, the record has no spilled gradient. If the job is discarded
    /// after it has ended, the discard drops the update and keeps the spilled gradient.
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
                "{name:?} is in RAM, so its update cannot spill the gradient: call spill(), then update()"
            )));
        }
        let update = KernelUpdate::new(store, record, GradientSource::Spilled(Vec::new()), values, rule.into())?;
        let update = update.spilling(Spill::new(store, record, gradient, false)?);
        self.shared.queue.push(Job::new(record, update), &mut wait)
    }

    /// Queues a job that writes a gradient to the record's place for a spilled gradient. With `add`, the job adds
    /// `gradient` to the gradient that is in this place already. It computes the sum in float32, or in float64 for
    /// float64 gradients. It rounds the sum once, to the dtype of the spilled gradient. If the record is in RAM, this
    /// function queues no job: it keeps the gradient, or the sum, in memory.
    ///
    /// Returns once the queue has room for the gradient. A spilled gradient is not part of a step: a commit keeps the
    /// spilled gradient, and opening the store again forgets it. If the job fails or is discarded, the record has no
    /// spilled gradient.
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

    /// Waits for the jobs of a record. Then returns the [`Check`] of the record's spilled gradient: whether all
    /// elements are finite, and the sum of their squares.
    pub fn spilled(&self, record: usize, mut wait: Wait<'_>) -> Result<Check> {
        self.known(record)?;
        if let Some(kept) = self.ram_tier.kept(record) {
            return Ok(kept.spilled);
        }
        self.shared.queue.wait(&mut wait, "work on the gradient", |state| !state.has(record))?.failure()?;
        let spilled = self.shared.store.spilled(record)?;
        spilled.ok_or_else(|| nothing(&self.shared.store, record))
    }

    /// Reads the spilled gradient of a record into `into`, after all queued jobs of the record. No other code may use
    /// the memory of `into` during the read.
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
        Err(Error::Usage("the read of a spilled gradient was discarded with its step; read the gradient again".into()))
    }

    /// Forgets the spilled gradient of a record, after all queued jobs of the record.
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

    /// Queues a job that calls a function on a record: on one chunk after the other, or on the whole record at once. If
    /// the record is in RAM, the job waits for [`Engine::finish`] or [`Engine::commit`], and drops `values`.
    ///
    /// Returns once the queue has room for the function's tensors. `values` are the record's values after the last
    /// commit, as for [`Engine::update`]. State tensors that are not cut into chunks are read before the first call of
    /// the function, and staged after the last call.
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

    /// Returns an error unless the record has a spilled gradient after all waiting and running jobs of the record.
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
        // If an earlier error of this step lost the gradient, return the earlier error.
        self.shared.queue.lock().failure()?;
        Err(nothing(&self.shared.store, record))
    }

    /// Returns an error in a forked child process. The engine's threads do not run in the child. A lock that one of
    /// these threads held at the fork would never be released in the child.
    pub(crate) fn here(&self) -> Result<()> {
        if self.maker.is_elsewhere() {
            let why =
                "this process is a fork of the process that created the engine: use the engine in the original process";
            return Err(Error::Usage(why.into()));
        }
        Ok(())
    }

    pub(crate) fn known(&self, record: usize) -> Result<&memascend_store::Record> {
        self.here()?;
        let records = &self.shared.store.description().records;
        records
            .get(record)
            .ok_or_else(|| Error::Invalid(format!("no record {record}: the store has {} records", records.len())))
    }

    /// Returns the store that the engine updates.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.shared.store
    }

    /// Returns how many bytes of memory the engine has allocated: the staging chunks, and the memory for functions.
    /// Tensors in the queue do not count.
    #[must_use]
    pub fn staging_bytes(&self) -> usize {
        self.staging_bytes
    }

    /// Returns the bytes of callers' tensors in queued and running jobs, as [`Counters::queued`] counts them.
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

    /// Drops the queued jobs that are not urgent, waits until all other jobs have stopped, and ends the thread.
    /// Uncommitted updates are lost. A second call does nothing. A call in a forked child does nothing, too. A call by
    /// a function that the engine runs does not wait.
    pub fn close(&self) {
        if self.here().is_err() {
            return;
        }
        self.shared.queue.lock().closing = true;
        self.cancel(None);
        let thread = locked(&self.thread).take();
        // A function may close the engine that calls it. Do not join the pipeline's thread then: it runs the function
        // or waits for it. The thread ends after the function has returned.
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
        // If the pipeline panics, unwinding drops the reads and writes in flight. Dropping a read or a write waits for
        // the device. So the memory is freed only after the device has stopped using the memory.
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
        // Dropping the jobs drops the callers' buffers, and the drop of a buffer may panic. So wake all waiting callers
        // first, and catch the panic.
        drop(caught(|| drop(dropped)));
    }
}

#[cfg(test)]
#[path = "../tests/inside/panics.rs"]
mod panics;
