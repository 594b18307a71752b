//! Runs a kernel with a chosen number of threads and a chosen instruction set.

use std::{
    num::NonZeroUsize,
    sync::{Mutex, PoisonError},
    thread,
};

use crate::{Result, Simd};

/// The smallest number of elements for each thread. Starting a thread takes about as long as a pass over this many
/// elements, so a thread with fewer elements costs more than it saves.
pub const THREAD_ELEMENTS_MIN: usize = 1 << 18;

/// The number of parts for each thread. If the system suspends a thread, the other threads take its remaining parts.
const PARTS_PER_THREAD: usize = 4;

/// The number of threads and the instruction set of a call. The result of a call does not depend on them, except
/// for the bits of a NaN.
#[derive(Debug, Clone, Copy)]
pub struct Exec {
    threads: NonZeroUsize,
    simd: Simd,
}

impl Exec {
    /// Uses at most `threads` threads, including the caller's, and the instruction set of [`Simd::chosen`].
    pub fn new(threads: NonZeroUsize) -> Result<Self> {
        Ok(Self { threads, simd: Simd::chosen()? })
    }

    /// Returns a copy with the given instruction set.
    #[must_use]
    pub fn with_simd(self, simd: Simd) -> Self {
        Self { simd, ..self }
    }

    /// Returns a copy with the given number of threads.
    #[must_use]
    pub fn with_threads(self, threads: NonZeroUsize) -> Self {
        Self { threads, ..self }
    }

    /// Runs `job` on `work`. With several threads, splits `work` at multiples of `grain` elements and runs `job` on
    /// every part. The calling thread works too. If the system starts no more threads, the running threads do all
    /// parts.
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
        // Threads take parts from the front, so that they advance through memory side by side.
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

/// A range of elements that can be split in two.
pub(crate) trait Work: Send + Sized {
    fn len(&self) -> usize;
    fn split_at(self, middle: usize) -> (Self, Self);
}
