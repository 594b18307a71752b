//! Verifies the checksums of fetched parts of units on dedicated threads.

use std::{
    collections::VecDeque,
    sync::Arc,
    thread::{self, JoinHandle},
};

use memascend_mem::{Guarded, Maker, Wait};

use crate::{Buffer, Error, PartFetch, Result};

/// Threads that verify the checksums of parts, in the order of the calls of [`Checkers::check`]. Before a thread
/// verifies a part, it waits for the part's reads.
///
/// Dropping `Checkers` first verifies all queued parts, then ends the threads.
pub struct Checkers<B: Buffer + Sync> {
    line: Arc<CheckQueue<B>>,
    threads: Vec<JoinHandle<()>>,
    /// The process that started the threads. A forked child does not have these threads.
    maker: Maker,
}

struct CheckQueue<B: Buffer + Sync> {
    state: Guarded<Waiting<B>>,
}

struct Waiting<B: Buffer + Sync> {
    waiting: VecDeque<(Arc<PartFetch<B>>, Arc<Checked>)>,
    closing: bool,
}

/// True once a thread has verified a part, whatever the result.
#[derive(Default)]
struct Checked(Guarded<bool>);

/// A part that is being read and verified. Dropping a `Checking` waits until no device and no thread uses the part's
/// memory.
pub struct Checking<B: Buffer + Sync> {
    part: Arc<PartFetch<B>>,
    /// Becomes true once a thread of [`Checkers`] has verified the part. `None` if [`Checking::wait`] verifies the part
    /// instead.
    checked: Option<Arc<Checked>>,
}

impl<B: Buffer + Sync + 'static> Checkers<B> {
    /// Starts `threads` threads, or fewer if the system does not allow so many. If no thread could be started,
    /// [`Checking::wait`] verifies each part.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let state = Waiting { waiting: VecDeque::new(), closing: false };
        let line = Arc::new(CheckQueue { state: Guarded::new(state) });
        let begun = (0..threads).map_while(|_| {
            let line = Arc::clone(&line);
            thread::Builder::new().name("memascend-check".into()).spawn(move || line.serve()).ok()
        });
        Self { threads: begun.collect(), line, maker: Maker::here() }
    }

    /// Returns the number of threads that were started.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Queues a part. A thread verifies the part once the part's reads have ended. If no thread could be started,
    /// queues nothing, and [`Checking::wait`] verifies the part.
    #[must_use]
    pub fn check(&self, part: PartFetch<B>) -> Checking<B> {
        if self.threads.is_empty() {
            return Checking::from(part);
        }
        let part = Arc::new(part);
        let checked = Arc::new(Checked::default());
        self.line.state.lock().waiting.push_back((Arc::clone(&part), Arc::clone(&checked)));
        self.line.state.notify_one();
        Checking { part, checked: Some(checked) }
    }
}

impl<B: Buffer + Sync> CheckQueue<B> {
    fn serve(&self) {
        while let Some((part, checked)) = self.next() {
            // `Ended` sets `checked` even if the verification panics, so that `Checking::wait` always returns.
            let _ended = Ended(&checked);
            // `part` keeps the result, and `Checking::wait` returns it.
            drop(part.wait(Wait::forever()));
            drop(part);
        }
    }

    /// Waits for the next queued part and returns it. Returns `None` once the queue is closing and empty.
    fn next(&self) -> Option<(Arc<PartFetch<B>>, Arc<Checked>)> {
        self.state.when(|state| state.closing || !state.waiting.is_empty()).waiting.pop_front()
    }
}

impl<B: Buffer + Sync> Drop for Checkers<B> {
    fn drop(&mut self) {
        if self.maker.is_elsewhere() {
            // A forked child has no threads to join.
            return;
        }
        self.line.state.lock().closing = true;
        self.line.state.notify_all();
        for thread in self.threads.drain(..) {
            // The panic hook has already reported a thread that panicked.
            drop(thread.join());
        }
    }
}

/// Sets its `Checked` to true when dropped.
struct Ended<'a>(&'a Checked);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        *self.0.0.lock() = true;
        self.0.0.notify_all();
    }
}

/// Makes a `Checking` without a thread: [`Checking::wait`] verifies the part.
impl<B: Buffer + Sync> From<PartFetch<B>> for Checking<B> {
    fn from(part: PartFetch<B>) -> Self {
        Self { part: Arc::new(part), checked: None }
    }
}

impl<B: Buffer + Sync> Checking<B> {
    /// True once the part was read and, if a thread verifies the part, once that thread has verified it. Never waits.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.checked.as_ref().map_or_else(|| self.part.is_done(), |checked| *checked.0.lock())
    }

    /// Waits until the part was read and verified, and returns the result. Fails if `wait` ends first: a later call can
    /// continue to wait. Once the part was verified, every call returns the same result. After a success the caller may
    /// use the part's memory.
    pub fn wait(&self, mut wait: Wait<'_>) -> Result<()> {
        if let Some(checked) = &self.checked {
            let waited = checked.0.wait_until(&mut wait, |is| *is).map(drop);
            waited.map_err(|ended| Error::of_wait(ended, "the read of a part of a unit"))?;
        }
        self.part.wait(wait)
    }
}

impl<B: Buffer + Sync> Drop for Checking<B> {
    fn drop(&mut self) {
        if let Some(checked) = &self.checked {
            // The caller may reuse the part's memory after this drop: wait until the checking thread has stopped
            // reading that memory.
            drop(checked.0.when(|is| *is));
        }
    }
}
