//! Calls users' functions on whole records, one at a time, on a separate thread. Meanwhile the pipeline's thread reads
//! and writes.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::mpsc::{Receiver, Sender, channel},
    thread::{self, JoinHandle},
};

use crate::{Error, Result, job::Call, queue::Queue};

/// The thread that runs the calls. All calls share one thread, because torch creates a team of threads for every thread
/// that computes.
struct Calls {
    begun: Sender<Call>,
    ended: Receiver<thread::Result<Result<()>>>,
    thread: JoinHandle<()>,
}

/// Calls one function at a time. Dropping a `Caller` waits for the running call.
#[derive(Default)]
pub(crate) struct Caller {
    /// `None` until the first call starts the thread. An engine that makes no call has no such thread.
    calls: Option<Calls>,
}

impl Caller {
    /// Starts a call. The pipeline must have waited for the previous call.
    pub(crate) fn begin(&mut self, queue: &Queue, call: Call) -> Result<()> {
        let calls = match self.calls.take() {
            Some(calls) => calls,
            None => started(queue)?,
        };
        let begun = calls.begun.send(call);
        self.calls = Some(calls);
        begun.map_err(|_| ended())
    }

    /// Waits for the call that `begin` started. If the function panicked, resumes the panic on this thread.
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

fn started(queue: &Queue) -> Result<Calls> {
    let ((begun, calls), (results, ended)) = (channel::<Call>(), channel());
    let serve = move || {
        for call in calls {
            if results.send(catch_unwind(AssertUnwindSafe(call))).is_err() {
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("memascend-call".into()).spawn(serve);
    let thread =
        thread.map_err(|error| Error::Invalid(format!("could not start a thread ({error}): check ulimit -u")))?;
    queue.calls_on(thread.thread().id());
    Ok(Calls { begun, ended, thread })
}

fn ended() -> Error {
    Error::Usage(
        "the engine's thread that calls functions has ended; close this engine and open the store again".into(),
    )
}
