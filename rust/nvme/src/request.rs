//! Cuts operations into requests for single devices, and interprets the results of the requests.

use std::{collections::VecDeque, path::Path, sync::Arc};

use memascend_mem::locked;

use crate::{
    Error, Lane,
    error::Action,
    operation::{Address, Kind, Operation},
};

/// The largest request, in bytes. Every measured disk reaches its peak bandwidth with requests of 1 MiB. Larger
/// requests gain nothing and miss the L3 cache.
pub const REQUEST_BYTES_MAX: usize = 1 << 20;
/// How often in a row, at most, a backend retries a request after EINTR, EAGAIN, ENOMEM or a transfer of less than a
/// block. With [`PAUSE`] the retries take about two seconds; a shortage of memory that lasts longer is not temporary.
const TRIES_MAX: u32 = 2_000;
/// The number of retries without a pause. Each later retry follows a pause of [`PAUSE`].
const TRIES_AT_ONCE: u32 = 8;
/// The pause before a retry: long enough for the kernel to reclaim memory, short compared with any timeout.
pub(crate) const PAUSE: std::time::Duration = std::time::Duration::from_millis(1);

/// An operation, or a part of an operation, that is being cut into requests.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) operation: Arc<Operation>,
    /// Units of the operation that are already cut into requests.
    cut: u64,
}

impl Job {
    pub(crate) fn new(operation: Arc<Operation>) -> Self {
        Self { operation, cut: 0 }
    }

    /// Cuts off the next request; `None` if no request is left.
    #[expect(clippy::cast_possible_truncation, reason = "at most REQUEST_BYTES_MAX, or the index of a device")]
    pub(crate) fn next_request(&mut self) -> Option<Request> {
        let operation = &self.operation;
        let left = operation.units - self.cut;
        if left == 0 {
            return None;
        }
        if operation.is_failed() {
            // The caller receives the error of the part that failed: skip the rest.
            self.cut = operation.units;
            operation.complete_units(left, Ok(()));
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

/// Queued jobs. All jobs of the first lane come before the jobs of the second lane. Within a lane, jobs keep the order
/// in which they were pushed.
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

/// A transfer or flush on one device.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) device: usize,
    pub(crate) kind: Kind,
    /// Offset on the device of the bytes that remain to be moved.
    pub(crate) offset: u64,
    pub(crate) address: Address,
    /// The number of bytes that remain to be moved.
    pub(crate) bytes: usize,
    asked_bytes: usize,
    tries: u32,
    operation: Arc<Operation>,
    settled: bool,
}

/// What the backend must do after a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// Nothing: the operation has the result.
    Settled,
    /// Submit the request again for the bytes that remain. If `pause`, wait for [`PAUSE`] first.
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

    /// Handles `answer`, the device's result: the number of bytes moved, or an error number. Reports a final result to
    /// the operation, or prepares the request for its next submission. Returns what the backend must do next.
    pub(crate) fn interpret_result(&mut self, answer: Result<usize, i32>) -> NextStep {
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

    /// Handles a short transfer: the request continues after the last whole block that was moved, because direct I/O
    /// needs aligned offsets. A read that moves nothing, or repeatedly less than a block, has reached the file's end. A
    /// write that repeatedly moves less than a block fails with EIO.
    fn stopped_short(&mut self, moved: usize) -> NextStep {
        let whole = moved / self.operation.context.block_bytes * self.operation.context.block_bytes;
        if whole > 0 {
            locked(&self.operation.context.stats).continued += 1;
            self.offset += whole as u64;
            self.address = self.address.plus(whole);
            self.bytes -= whole;
            self.tries = 0;
            return NextStep::Again { pause: false };
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

    fn again(&mut self) -> NextStep {
        self.tries += 1;
        NextStep::Again { pause: self.tries > TRIES_AT_ONCE }
    }

    fn settle(&mut self, result: crate::Result<()>) -> NextStep {
        self.settled = true;
        let units = if self.kind == Kind::Flush { 1 } else { self.asked_bytes as u64 };
        self.operation.complete_units(units, result);
        NextStep::Settled
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
    /// If the operation does not have the request's result yet, reports ECANCELED, so that a waiter gets an error and
    /// does not hang. This happens if a thread of the backend panics.
    fn drop(&mut self) {
        if !self.settled {
            self.settle(Err(self.failure(libc::ECANCELED)));
        }
    }
}
