//! The engine: the pipeline's thread and memory, and what callers ask of it.

use std::{
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
};

use memascend_math::Hyperparameters;
use memascend_mem::{ChunkRing, OnFork, OwnerId, Pin, Region, Wait};
use memascend_store::{Commit, Store};

use crate::{
    Counters, Error, First, Gradient, Result,
    bench::Parts,
    fill::Fill,
    job::{Job, Work},
    pipeline::{CHUNKS_DEFAULT, Pipeline},
    queue::{Queue, State},
    update::{Update, has_adam},
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
    /// How the staging chunks are pinned.
    pub pin: Pin,
}

impl Default for Options {
    fn default() -> Self {
        Self { chunks: CHUNKS_DEFAULT, queue_bytes_max: 256 << 20, pin: Pin::Off }
    }
}

/// Updates of a store. See the crate's description.
pub struct Engine {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    staging_bytes: usize,
}

struct Shared {
    store: Arc<Store>,
    queue: Queue,
    ring: ChunkRing,
    owner: OwnerId,
    chunks: usize,
}

impl Engine {
    /// Starts an engine on a store.
    pub fn new(store: Arc<Store>, options: &Options) -> Result<Self> {
        let chunks = options.chunks;
        if !(CHUNKS_MIN..=CHUNKS_MAX).contains(&chunks) {
            return Err(Error::Invalid(format!("{chunks} staging chunks: {CHUNKS_MIN} to {CHUNKS_MAX} work")));
        }
        let chunk_bytes = Parts::new(store.description()).bytes();
        let region = Region::new(chunks * chunk_bytes, options.pin, OnFork::Wipe, "update staging")?;
        let ring = ChunkRing::new(&region, chunk_bytes, chunks)?;
        let owner = ring.owner("update")?;
        let shared = Arc::new(Shared { store, queue: Queue::new(options.queue_bytes_max), ring, owner, chunks });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("memascend-update".into())
            .spawn(move || theirs.serve())
            .map_err(|error| Error::Invalid(format!("no thread could be started: {error}")))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), staging_bytes: region.bytes() })
    }

    /// Begins the first values of an entry, whose update number is then 0. Nothing is read.
    ///
    /// Returns at once, or when so many bytes of tensors no longer wait. The tensors are held until they were used.
    pub fn fill(&self, entry: usize, first: First, mut wait: Wait<'_>) -> Result<()> {
        self.known(entry)?;
        let fill = Fill::new(&self.shared.store, entry, first)?;
        self.shared.queue.push(Job::new(entry, Work::Fill(fill)), &mut wait)
    }

    /// Begins the update of an entry by its gradient, as its update number `hyperparameters.step`.
    ///
    /// Returns at once, or when so many bytes of gradients no longer wait. The gradient is held until it has been used.
    pub fn update(
        &self,
        entry: usize,
        gradient: Gradient,
        hyperparameters: &Hyperparameters,
        mut wait: Wait<'_>,
    ) -> Result<()> {
        let description = self.shared.store.description();
        let described = self.known(entry)?;
        let name = &described.name;
        if gradient.elements() != described.elements() {
            let (got, wanted) = (gradient.elements(), described.elements());
            return Err(Error::Invalid(format!("the gradient of {name:?} has {got} elements, not {wanted}")));
        }
        if !has_adam(description, entry) {
            return Err(Error::Invalid(format!(
                "{name:?} does not have Adam's state: float32 tensors of its shape, two moments, and before them a master where \
                 its values are of 16 bits"
            )));
        }
        let update = Update { gradient, scalars: hyperparameters.scalars()?, step: hyperparameters.step };
        self.shared.queue.push(Job::new(entry, Work::Update(update)), &mut wait)
    }

    fn known(&self, entry: usize) -> Result<&memascend_store::Entry> {
        let entries = &self.shared.store.description().entries;
        entries.get(entry).ok_or_else(|| Error::Invalid(format!("entry {entry} of {}", entries.len())))
    }

    /// Waits until every update is staged. The first error of the step is raised here or by an update, once.
    pub fn finish(&self, mut wait: Wait<'_>) -> Result<()> {
        let mut state = self.shared.queue.wait(&mut wait, "updates", State::is_idle)?;
        state.failure()
    }

    /// Waits for every update, and makes the step live and durable.
    pub fn commit(&self, commit: Commit, mut wait: Wait<'_>) -> Result<u64> {
        self.shared.queue.wait(&mut wait, "updates", State::is_idle)?.failure()?;
        Ok(self.shared.store.commit(commit, wait)?)
    }

    /// Drops what waits, drains what is in flight, and forgets what was staged. A step that failed is over.
    pub fn discard(&self, mut wait: Wait<'_>) -> Result<()> {
        drop(self.cancel(None));
        let mut state = self.shared.queue.wait(&mut wait, "updates", State::is_idle)?;
        state.failed = None;
        state.told = false;
        drop(state);
        Ok(self.shared.store.discard(wait)?)
    }

    /// As [`Engine::discard`] for one entry alone: the others go on. A step that failed stays so.
    pub fn discard_entry(&self, entry: usize, mut wait: Wait<'_>) -> Result<()> {
        self.known(entry)?;
        drop(self.cancel(Some(entry)));
        drop(self.shared.queue.wait(&mut wait, "updates", |state| !state.has(entry))?);
        Ok(self.shared.store.discard_entry(entry, wait)?)
    }

    /// Drops what waits and cancels what runs, of one entry alone if one is given.
    fn cancel(&self, entry: Option<usize>) -> Vec<Job> {
        let mut state = self.shared.queue.lock();
        let dropped = state.drop_waiting(entry);
        state.cancel(entry);
        drop(state);
        self.shared.queue.notify();
        dropped
    }

    /// What it works on.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.shared.store
    }

    /// Bytes of its staging chunks: all the memory that it holds beside the gradients in its queue.
    #[must_use]
    pub fn staging_bytes(&self) -> usize {
        self.staging_bytes
    }

    /// What it has done.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.shared.queue.lock().counters
    }

    /// Drops what waits, drains what is in flight and ends the thread. What was not committed is lost. Twice is fine.
    pub fn close(&self) {
        let waiting = {
            let mut state = self.shared.queue.lock();
            state.closing = true;
            state.cancel(None);
            state.drop_waiting(None)
        };
        drop(waiting);
        self.shared.queue.notify();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
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
    fn serve(&self) {
        match Pipeline::new(&self.store, &self.queue, &self.ring, self.owner, self.chunks) {
            Ok(mut pipeline) => pipeline.serve(),
            Err(error) => self.queue.lock().failed = Some(error),
        }
    }
}
