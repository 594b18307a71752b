//! Applies updates to records in RAM after the commit of their step. Such an update only computes in memory, so no I/O
//! error can interrupt it.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use memascend_mem::{Wait, locked};
use memascend_store::{InMemoryUpdate, Scratch, Shared, Store};

use crate::{Result, error::catch_panic, ram_tier::Waiting, turn::Turn, workbench::Workbench};

/// The longest time that a thread waits for a staging chunk. There are at least as many chunks as threads. After a
/// commit, only the threads of [`Workers`] and urgent jobs use staging chunks, and an urgent job soon returns its
/// chunks. So no thread waits this long.
const LEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// Updates chunks of records in RAM on several threads.
pub(crate) struct Workers<'a> {
    pub(crate) store: &'a Store,
    /// The staging chunks. Each thread leases one chunk, for data that is not in the RAM tier, such as a gradient.
    pub(crate) staging: &'a Scratch,
    pub(crate) threads: usize,
}

/// Updates that several threads read.
struct SharedUpdates<'a>(Vec<(Waiting, InMemoryUpdate<'a>)>);

// SAFETY: threads only read the updates. The gradient of a record in RAM is in host memory, and nothing writes to this
// memory ([Note: handed-over memory]).
unsafe impl Sync for SharedUpdates<'_> {}

impl Workers<'_> {
    /// Returns an error if code other than an update has changed the values of these records. Runs before the commit,
    /// so that the step can still be discarded.
    pub(crate) fn check(&self, records: &[(usize, u64)]) -> Result<()> {
        let chunks = self.chunks(records.iter().map(|&(record, _)| record));
        self.each(chunks.len(), &|next| {
            while let Some(&(_, record, chunk)) = chunks.get(next.fetch_add(1, Relaxed)) {
                self.store.check_values(record, chunk)?;
            }
            Ok(())
        })
    }

    /// Applies updates after their commit, and returns the number of updated chunks. If an update fails, the store
    /// rejects all later staging and commits, because the records in memory then belong to no step.
    pub(crate) fn apply(&self, waiting: Vec<Waiting>) -> Result<u64> {
        let Some(first) = waiting.first().map(|job| job.record) else { return Ok(0) };
        let applied = catch_panic(|| self.applied(waiting));
        applied.inspect_err(|error| self.store.fail_application(first, &error.to_string()))
    }

    fn applied(&self, waiting: Vec<Waiting>) -> Result<u64> {
        let with_memory =
            |job: Waiting| Ok(self.store.application(job.record).map(|application| (job, application))?);
        let updates = SharedUpdates(waiting.into_iter().map(with_memory).collect::<Result<Vec<_>>>()?);
        let chunks = self.chunks(updates.0.iter().map(|(job, _)| job.record));
        let seen = &updates;
        self.each(chunks.len(), &|next| {
            let bench = Workbench::in_place(self.store)?;
            while let Some(&(update, record, index)) = chunks.get(next.fetch_add(1, Relaxed)) {
                let (job, application) = &seen.0[update];
                let lease = self.staging.lease(Wait::at_most(LEASE_TIMEOUT)).map_err(memascend_store::Error::from)?;
                job.work.compute(&bench, &Turn { record, index, memory: Shared::new(lease) })?;
                application.chunk_applied(index);
            }
            Ok(())
        })?;
        for (_, application) in updates.0 {
            application.applied();
        }
        Ok(chunks.len() as u64)
    }

    /// Returns all chunks of `records`. For each chunk, returns the position of its record in `records`, the record,
    /// and the index of the chunk.
    fn chunks(&self, records: impl Iterator<Item = usize>) -> Vec<(usize, usize, u32)> {
        let of =
            |(number, record)| (0..self.store.layout().chunks_of(record)).map(move |chunk| (number, record, chunk));
        records.enumerate().flat_map(of).collect()
    }

    /// Runs `work` on the calling thread and on further threads: at most `self.threads` threads in all, and at most
    /// `count`. `work` gets a counter that all threads share, and takes numbers from it until a number reaches `count`.
    /// Returns an error if `work` fails on any thread.
    fn each(&self, count: usize, work: &(dyn Fn(&AtomicUsize) -> Result<()> + Sync)) -> Result<()> {
        let next = AtomicUsize::new(0);
        let threads = self.threads.min(count).max(1);
        let failed = Mutex::new(None);
        let worker = || {
            if let Err(error) = catch_panic(|| work(&next)) {
                locked(&failed).get_or_insert(error);
            }
        };
        thread::scope(|scope| {
            for _ in 1..threads {
                if thread::Builder::new().name("memascend-ram".into()).spawn_scoped(scope, worker).is_err() {
                    break;
                }
            }
            worker();
        });
        let failed = locked(&failed).take();
        failed.map_or(Ok(()), Err)
    }
}
