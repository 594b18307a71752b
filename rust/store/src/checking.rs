//! Verifies checksums of parts on threads of their own.

use std::{
    collections::VecDeque,
    sync::Arc,
    thread::{self, JoinHandle},
};

use memascend_mem::{Guarded, Maker, Wait};

use crate::{Buffer, Error, PartFetch, Result};

/// Threads that wait for parts and check them, in the order in which they were handed over.
///
/// Dropping it checks what was handed over, and ends the threads.
pub struct Checkers<B: Buffer + Sync> {
    line: Arc<CheckQueue<B>>,
    threads: Vec<JoinHandle<()>>,
    /// The process that has the threads.
    maker: Maker,
}

struct CheckQueue<B: Buffer + Sync> {
    state: Guarded<Waiting<B>>,
}

struct Waiting<B: Buffer + Sync> {
    waiting: VecDeque<(Arc<PartFetch<B>>, Arc<Checked>)>,
    closing: bool,
}

/// Whether a part was checked, well or not.
#[derive(Default)]
struct Checked(Guarded<bool>);

/// A part that is being read and checked. Dropping it waits for both.
pub struct Checking<B: Buffer + Sync> {
    part: Arc<PartFetch<B>>,
    /// `None`: there is no thread for it, and whoever waits checks.
    checked: Option<Arc<Checked>>,
}

impl<B: Buffer + Sync + 'static> Checkers<B> {
    /// As many threads, or as many as can be had; with none, whoever waits for a part checks it.
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

    /// Threads that were begun.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Checks a part as soon as it has come.
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
            // Also where the check panics: nobody waits for ever.
            let _ended = Ended(&checked);
            // What came of it stays with the part.
            drop(part.wait(Wait::forever()));
            drop(part);
        }
    }

    fn next(&self) -> Option<(Arc<PartFetch<B>>, Arc<Checked>)> {
        self.state.when(|state| state.closing || !state.waiting.is_empty()).waiting.pop_front()
    }
}

impl<B: Buffer + Sync> Drop for Checkers<B> {
    fn drop(&mut self) {
        if self.maker.is_elsewhere() {
            return;
        }
        self.line.state.lock().closing = true;
        self.line.state.notify_all();
        for thread in self.threads.drain(..) {
            // One that panicked has said so.
            drop(thread.join());
        }
    }
}

struct Ended<'a>(&'a Checked);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        *self.0.0.lock() = true;
        self.0.0.notify_all();
    }
}

/// Checked by whoever waits for it.
impl<B: Buffer + Sync> From<PartFetch<B>> for Checking<B> {
    fn from(part: PartFetch<B>) -> Self {
        Self { part: Arc::new(part), checked: None }
    }
}

impl<B: Buffer + Sync> Checking<B> {
    /// Whether it was read, and checked where threads do that. Never waits.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.checked.as_ref().map_or_else(|| self.part.is_done(), |checked| *checked.0.lock())
    }

    /// Waits until it was read and checked; says what came of it, and waiting again says the same. Once that succeeded,
    /// the memory is the caller's again.
    pub fn wait(&self, mut wait: Wait<'_>) -> Result<()> {
        if let Some(checked) = &self.checked {
            let waited = checked.0.wait_until(&mut wait, |is| *is).map(drop);
            waited.map_err(|ended| Error::of_wait(ended, "a part"))?;
        }
        self.part.wait(wait)
    }
}

impl<B: Buffer + Sync> Drop for Checking<B> {
    fn drop(&mut self) {
        if let Some(checked) = &self.checked {
            // Else its thread would look at memory that may be another's by then.
            drop(checked.0.when(|is| *is));
        }
    }
}
