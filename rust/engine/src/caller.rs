//! Calls functions on a thread of their own, one after the other, while the pipeline's thread reads and writes.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::Instant,
};

use memascend_store::Store;

use crate::{Error, Result, job::Call, queue::Queue};

/// A thread for calls. It is one for all of them, since each thread that computes with torch has a team of threads.
struct Calls {
    /// The entry that each is of, for traces.
    begun: Sender<(usize, Call)>,
    ended: Receiver<thread::Result<Result<()>>>,
    thread: JoinHandle<()>,
}

/// Calls one function at a time. Dropping it waits for that.
pub(crate) struct Caller {
    store: Arc<Store>,
    /// From the first call on: most engines have none.
    calls: Option<Calls>,
}

impl Caller {
    pub(crate) fn new(store: Arc<Store>) -> Self {
        Self { store, calls: None }
    }

    /// Begins a call; the one before was waited for.
    pub(crate) fn begin(&mut self, queue: &Queue, entry: usize, call: Call) -> Result<()> {
        let calls = match self.calls.take() {
            Some(calls) => calls,
            None => started(Arc::clone(&self.store), queue)?,
        };
        let begun = calls.begun.send((entry, call));
        self.calls = Some(calls);
        begun.map_err(|_| ended())
    }

    /// Waits for the call that was begun. It panics where that did.
    pub(crate) fn wait(&self) -> Result<()> {
        let result = self.calls.as_ref().and_then(|calls| calls.ended.recv().ok());
        result.ok_or_else(ended)?.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(Calls { begun, thread, .. }) = self.calls.take() {
            drop(begun);
            drop(thread.join());
        }
    }
}

fn started(store: Arc<Store>, queue: &Queue) -> Result<Calls> {
    let ((begun, calls), (results, ended)) = (channel::<(usize, Call)>(), channel());
    let serve = move || {
        for (entry, call) in calls {
            let start = Instant::now();
            let result = catch_unwind(AssertUnwindSafe(call));
            let name = &store.description().entries[entry].name;
            store.volume().trace().span("compute", name, start, Instant::now());
            if results.send(result).is_err() {
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("memascend-call".into()).spawn(serve);
    let thread = thread.map_err(|error| Error::Invalid(format!("no thread could be started: {error}")))?;
    queue.calls_on(thread.thread().id());
    Ok(Calls { begun, ended, thread })
}

fn ended() -> Error {
    Error::Usage("the thread of functions has ended".into())
}
