//! Cuts operations into requests for single devices, and interprets their results.

use std::{collections::VecDeque, path::Path, sync::Arc};

use memascend_mem::locked;

use crate::{
    Error, Lane,
    error::Action,
    operation::{Address, Kind, Operation},
};

/// The largest request. At 1 MiB every disk measured is at its peak; larger ones gained nothing and lose the L3 cache.
pub const REQUEST_BYTES_MAX: usize = 1 << 20;
/// How often a request is made again for one answer that is no answer (EINTR, EAGAIN, ENOMEM): with the pause below
/// at least two seconds, after which the machine is not short of memory for a moment but out of it.
const TRIES_MAX: u32 = 2_000;
/// Tries before each next one is preceded by a pause of [`PAUSE`].
const TRIES_AT_ONCE: u32 = 8;
/// Long enough for memory to be reclaimed, short against any timeout.
pub(crate) const PAUSE: std::time::Duration = std::time::Duration::from_millis(1);

/// An operation, or a part of it, that has requests left to be made.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) operation: Arc<Operation>,
    /// Units of it that are requests already.
    cut: u64,
}

impl Job {
    pub(crate) fn new(operation: Arc<Operation>) -> Self {
        Self { operation, cut: 0 }
    }

    /// The next request, `None` when there are no more.
    #[expect(clippy::cast_possible_truncation, reason = "at most REQUEST_BYTES_MAX, or the index of a device")]
    pub(crate) fn next_request(&mut self) -> Option<Request> {
        let operation = &self.operation;
        let left = operation.units - self.cut;
        if left == 0 {
            return None;
        }
        if operation.is_failed() {
            // Nobody can use the rest of it.
            self.cut = operation.units;
            operation.landed(left, Ok(()));
            return None;
        }
        let request = if operation.kind == Kind::Flush {
            let device = self.cut as usize;
            self.cut += 1;
            Request::new(operation, device, 0, Address(std::ptr::null_mut()), 0)
        } else {
            let offset = operation.offset + self.cut;
            let place = operation.context.striping.locate(offset);
            let bytes = left.min(place.contiguous_bytes).min(REQUEST_BYTES_MAX as u64);
            self.cut += bytes;
            Request::new(operation, place.device, place.offset, operation.address_of(offset), bytes as usize)
        };
        Some(request)
    }
}

/// Jobs: those of the first lane before those of the second, and within a lane in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Jobs {
    first: VecDeque<Job>,
    second: VecDeque<Job>,
}

impl Jobs {
    pub(crate) fn push(&mut self, job: Job) {
        match job.operation.lane {
            Lane::First => self.first.push_back(job),
            Lane::Second => self.second.push_back(job),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_empty() && self.second.is_empty()
    }

    pub(crate) fn next_request(&mut self) -> Option<Request> {
        for lane in [&mut self.first, &mut self.second] {
            while let Some(job) = lane.front_mut() {
                if let Some(request) = job.next_request() {
                    return Some(request);
                }
                lane.pop_front();
            }
        }
        None
    }
}

/// What one device is asked for at once.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) device: usize,
    pub(crate) kind: Kind,
    /// On the device, of what is still to be moved.
    pub(crate) offset: u64,
    pub(crate) address: Address,
    /// What is still to be moved.
    pub(crate) bytes: usize,
    asked_bytes: usize,
    tries: u32,
    operation: Arc<Operation>,
    settled: bool,
}

/// What an answer means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Its operation knows the result.
    Settled,
    /// Ask for what remains; after a [`PAUSE`] if `pause`.
    Again { pause: bool },
}

impl Request {
    fn new(operation: &Arc<Operation>, device: usize, offset: u64, address: Address, bytes: usize) -> Self {
        let mut stats = locked(&operation.context.stats);
        match operation.kind {
            Kind::Read => stats.read.requests += 1,
            Kind::Write { .. } => stats.written.requests += 1,
            Kind::Flush => {}
        }
        drop(stats);
        let operation = Arc::clone(operation);
        let kind = operation.kind;
        Self { device, kind, offset, address, bytes, asked_bytes: bytes, tries: 0, operation, settled: false }
    }

    /// Takes the device's answer: bytes moved, or an error number.
    pub(crate) fn answered(&mut self, answer: Result<usize, i32>) -> Fate {
        match answer {
            Err(libc::EINTR | libc::EAGAIN | libc::ENOMEM) if self.tries < TRIES_MAX => {
                locked(&self.operation.context.stats).retried += 1;
                self.again()
            }
            Err(errno) => self.settle(Err(self.failure(errno))),
            Ok(_) if self.kind == Kind::Flush => self.settle(Ok(())),
            Ok(moved) if moved >= self.bytes => self.settle(Ok(())),
            Ok(moved) => self.stopped_short(moved),
        }
    }

    /// Goes on at the last whole block: direct I/O knows no other place. A part of a block again and again, or nothing,
    /// is the file's end.
    fn stopped_short(&mut self, moved: usize) -> Fate {
        let whole = moved / self.operation.context.block_bytes * self.operation.context.block_bytes;
        if whole > 0 {
            locked(&self.operation.context.stats).continued += 1;
            self.offset += whole as u64;
            self.address = self.address.plus(whole);
            self.bytes -= whole;
            self.tries = 0;
            return Fate::Again { pause: false };
        }
        if self.kind == Kind::Read && (moved == 0 || self.tries >= TRIES_AT_ONCE) {
            let ended = Error::Ended {
                path: Arc::clone(self.path()),
                offset: self.first_offset(),
                nbytes: self.asked_bytes,
                moved: self.asked_bytes - self.bytes + moved,
            };
            return self.settle(Err(ended));
        }
        if self.tries < TRIES_MAX { self.again() } else { self.settle(Err(self.failure(libc::EIO))) }
    }

    fn again(&mut self) -> Fate {
        self.tries += 1;
        Fate::Again { pause: self.tries > TRIES_AT_ONCE }
    }

    fn settle(&mut self, result: crate::Result<()>) -> Fate {
        self.settled = true;
        let units = if self.kind == Kind::Flush { 1 } else { self.asked_bytes as u64 };
        self.operation.landed(units, result);
        Fate::Settled
    }

    fn failure(&self, errno: i32) -> Error {
        let path = Arc::clone(self.path());
        let action = self.kind.action();
        let (offset, nbytes) = if action == Action::Flush { (0, 0) } else { (self.offset, self.bytes) };
        Error::Device { action, path, offset, nbytes, errno }
    }

    fn path(&self) -> &Arc<Path> {
        &self.operation.context.paths[self.device]
    }

    fn first_offset(&self) -> u64 {
        self.offset - (self.asked_bytes - self.bytes) as u64
    }
}

impl Drop for Request {
    /// A request that no device answers, because its backend is going down, is an error and never a hang.
    fn drop(&mut self) {
        if !self.settled {
            self.settle(Err(self.failure(libc::ECANCELED)));
        }
    }
}
