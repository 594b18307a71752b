//! Runs a kernel on the chosen number of threads and instruction set.

use std::{
    num::NonZeroUsize,
    sync::{Mutex, PoisonError},
    thread,
};

use crate::{Result, Simd};

/// Elements below which a further thread costs more than it saves: starting one takes about as long as a pass over
/// this many.
pub const THREAD_ELEMENTS_MIN: usize = 1 << 18;

/// Parts a thread takes one after the other: a thread that the system holds up leaves its later parts to the others.
const PARTS_PER_THREAD: usize = 4;

/// On how many threads and on which instruction set a call runs. The result never depends on it.
#[derive(Debug, Clone, Copy)]
pub struct Exec {
    threads: NonZeroUsize,
    simd: Simd,
}

impl Exec {
    /// At most `threads` threads, the caller's among them, on the instruction set of [`Simd::chosen`].
    pub fn new(threads: NonZeroUsize) -> Result<Self> {
        Ok(Self { threads, simd: Simd::chosen()? })
    }

    /// The same on a given instruction set.
    #[must_use]
    pub fn with_simd(self, simd: Simd) -> Self {
        Self { simd, ..self }
    }

    /// The same on another number of threads.
    #[must_use]
    pub fn with_threads(self, threads: NonZeroUsize) -> Self {
        Self { threads, ..self }
    }

    /// Cuts `work` at multiples of `grain` elements and runs `job` on every part. The caller works too; where the
    /// system refuses a thread, the others do its share.
    pub(crate) fn run<W: Work>(self, work: W, grain: usize, job: impl Fn(Simd, W) + Sync) {
        let threads = self.threads.get().min(work.len() / THREAD_ELEMENTS_MIN).max(1);
        if threads == 1 {
            return job(self.simd, work);
        }
        let share = work.len().div_ceil(threads * PARTS_PER_THREAD).next_multiple_of(grain);
        let mut parts = Vec::with_capacity(threads * PARTS_PER_THREAD);
        let mut rest = work;
        while rest.len() > share {
            let (part, after) = rest.split_at(share);
            parts.push(part);
            rest = after;
        }
        parts.push(rest);
        // Taken from the front, so that the threads walk through memory side by side.
        let queue = Mutex::new(parts.into_iter());
        let worker = || {
            loop {
                let part = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(part) = part else { break };
                job(self.simd, part);
            }
        };
        thread::scope(|scope| {
            for _ in 1..threads {
                if thread::Builder::new().name("memascend-math".into()).spawn_scoped(scope, worker).is_err() {
                    break;
                }
            }
            worker();
        });
    }
}

/// Something with elements that can be cut in two.
pub(crate) trait Work: Send + Sized {
    fn len(&self) -> usize;
    fn split_at(self, middle: usize) -> (Self, Self);
}
