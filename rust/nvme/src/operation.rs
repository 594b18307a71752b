//! Tracks one operation on a volume: its bytes, how many of them are unfinished, its result and its waiters.

use std::{
    any::Any,
    ops::Range,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use memascend_mem::{Guarded, Maker, Wait, locked};

use crate::{
    Error, Result, VolumeStats,
    align::Alignment,
    error::Action,
    stripe::Striping,
    traffic::{Begun, Hold, Traffic},
};

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    /// If `durable`, the write ends only once the bytes are on the medium (`RWF_DSYNC`).
    Write {
        durable: bool,
    },
    Flush,
}

impl Kind {
    pub(crate) fn action(self) -> Action {
        match self {
            Self::Read => Action::Read,
            Self::Write { .. } => Action::Write,
            Self::Flush => Action::Flush,
        }
    }

    pub(crate) fn writes(self) -> bool {
        matches!(self, Self::Write { .. })
    }
}

/// A backend sends all waiting requests of the first lane before the waiting requests of the second lane. A backend
/// does not recall requests that a device already has. So a new request of the first lane may wait for these requests,
/// of which there are at most the queue depth times the number of devices.
///
/// A request of the second lane never moves to the first lane, however long it waits. So callers must not keep the
/// first lane full. Reads of units do not keep the first lane full: the memory for units is limited, and each unit is
/// read once for the computation that needs it. Between the reads of two units, the second lane has its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lane {
    /// Requests that a caller waits for, or will wait for soon.
    First,
    /// All other requests.
    #[default]
    Second,
}

/// State that all operations of a volume share.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) maker: Maker,
    pub(crate) paths: Box<[Arc<Path>]>,
    pub(crate) striping: Striping,
    /// Offsets and lengths on a device must be multiples of this many bytes.
    pub(crate) block_bytes: usize,
    /// Addresses must be multiples of this many bytes.
    pub(crate) memory_align: usize,
    pub(crate) traffic: Traffic,
    pub(crate) stats: Mutex<VolumeStats>,
    /// The error of the first failed write whose ticket was dropped, until a flush or `close` reports it.
    pub(crate) unclaimed: Mutex<Option<Error>>,
    /// The error of the latest failed flush or durable write. The kernel does not write the failed data again, so every
    /// later flush fails.
    pub(crate) flush_failed: Mutex<Option<Error>>,
}

/// The address of an operation's bytes in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Address(pub(crate) *mut u8);

// SAFETY: `Address` is only a pointer, and its methods do not access the bytes. The contract of `Buffer` says who may
// access the bytes.
unsafe impl Send for Address {}
// SAFETY: the methods of `Address` do not access the bytes.
unsafe impl Sync for Address {}

impl Address {
    pub(crate) fn plus(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    pub(crate) fn is_aligned(self, to: usize) -> bool {
        self.0.addr().is_multiple_of(to)
    }
}

impl Context {
    pub(crate) fn new(paths: Vec<Arc<Path>>, striping: Striping, alignment: Alignment) -> Arc<Self> {
        Arc::new(Self {
            maker: Maker::here(),
            paths: paths.into(),
            striping,
            block_bytes: alignment.block,
            memory_align: alignment.memory,
            traffic: Traffic::default(),
            stats: Mutex::default(),
            unclaimed: Mutex::default(),
            flush_failed: Mutex::default(),
        })
    }

    /// Fails in a forked child.
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.maker.is_elsewhere() { Err(Error::Forked) } else { Ok(()) }
    }
}

/// The registrations of an operation. When the operation ends, it ends `begun`, releases `hold` and reports its result
/// to `whole`.
#[derive(Debug, Default)]
struct Registrations {
    /// The operation's number in `traffic`; `None` for a part and for an internal transfer.
    begun: Option<Begun>,
    /// The hold on the blocks that the operation writes.
    hold: Option<Hold>,
    /// The operation that this operation is a part of.
    whole: Option<Arc<Operation>>,
}

#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) context: Arc<Context>,
    pub(crate) kind: Kind,
    pub(crate) lane: Lane,
    /// Offset in the volume.
    pub(crate) offset: u64,
    /// Bytes to move; for a flush, the number of devices.
    pub(crate) units: u64,
    pub(crate) address: Address,
    /// The number of units that have no result yet.
    open: AtomicU64,
    failed: AtomicBool,
    marks: Registrations,
    progress: Guarded<Progress>,
    /// The caller's buffer. The kernel may access the buffer until the operation has ended, so the operation keeps the
    /// buffer until then.
    buffer: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Debug, Default)]
struct Progress {
    done: bool,
    error: Option<Error>,
    /// True once a caller has received the result, or `unclaimed` has this error or an earlier error.
    reported: bool,
    /// True once the ticket was dropped.
    dropped: bool,
}

impl Operation {
    /// Makes an operation for a caller. `place` is (offset, units), and `address` is the first byte of `buffer`. A
    /// flush has no buffer and a null address.
    pub(crate) fn new(
        context: &Arc<Context>,
        (kind, lane): (Kind, Lane),
        place: (u64, u64),
        address: Address,
        (begun, hold): (Begun, Option<Hold>),
        buffer: Option<Box<dyn Any + Send>>,
    ) -> Arc<Self> {
        Self::with(
            context,
            (kind, lane),
            place,
            address,
            Registrations { begun: Some(begun), hold, whole: None },
            buffer,
        )
    }

    /// Makes a part of `self`, for `range`. When the part ends, it releases `hold` and reports its result to `self`.
    pub(crate) fn part(self: &Arc<Self>, range: Range<u64>, hold: Option<Hold>) -> Arc<Self> {
        let at = self.address_of(range.start);
        let marks = Registrations { begun: None, hold, whole: Some(Arc::clone(self)) };
        Self::with(&self.context, (self.kind, self.lane), (range.start, range.end - range.start), at, marks, None)
    }

    /// Makes a transfer between `address` and the volume, without a ticket. The copy thread that submits the transfer
    /// also waits for its end.
    pub(crate) fn internal_transfer(
        context: &Arc<Context>,
        what: (Kind, Lane),
        range: Range<u64>,
        address: Address,
    ) -> Arc<Self> {
        Self::with(context, what, (range.start, range.end - range.start), address, Registrations::default(), None)
    }

    fn with(
        context: &Arc<Context>,
        (kind, lane): (Kind, Lane),
        (offset, units): (u64, u64),
        address: Address,
        marks: Registrations,
        buffer: Option<Box<dyn Any + Send>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: Arc::clone(context),
            kind,
            lane,
            offset,
            units,
            address,
            open: AtomicU64::new(units),
            failed: AtomicBool::new(false),
            marks,
            progress: Guarded::default(),
            buffer: Mutex::new(buffer),
        })
    }

    /// Returns the address in memory of the byte that belongs to `offset` in the volume.
    #[expect(clippy::cast_possible_truncation, reason = "inside the buffer, whose length is a usize")]
    pub(crate) fn address_of(&self, offset: u64) -> Address {
        self.address.plus((offset - self.offset) as usize)
    }

    /// True once a part of the operation has failed. Backends then skip the remaining requests.
    pub(crate) fn is_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Records `result` for `units` units of the operation. Once all units have a result, the operation ends.
    pub(crate) fn complete_units(&self, units: u64, result: Result<()>) {
        if let Err(error) = result {
            self.failed.store(true, Ordering::Relaxed);
            self.progress.lock().error.get_or_insert(error);
        }
        if self.open.fetch_sub(units, Ordering::AcqRel) == units {
            self.finish();
        }
    }

    /// Ends an operation of 0 bytes.
    pub(crate) fn finish_empty(&self) {
        debug_assert_eq!(self.units, 0);
        self.finish();
    }

    fn finish(&self) {
        let context = &*self.context;
        let mut progress = self.progress.lock();
        let error = progress.error.clone();
        // All steps before `done = true` must be complete before a waiter can see `done`.
        if progress.dropped {
            self.store_unreported_error(&mut progress);
        }
        if let Some(hold) = self.marks.hold {
            context.traffic.release(hold);
        }
        if let Some(begun) = self.marks.begun {
            self.count(error.as_ref());
            context.traffic.end(begun);
        }
        progress.done = true;
        drop(progress);
        self.progress.notify_all();
        if let Some(whole) = &self.marks.whole {
            whole.complete_units(self.units, error.map_or(Ok(()), Err));
        }
    }

    fn count(&self, error: Option<&Error>) {
        let mut stats = locked(&self.context.stats);
        let moved = match (self.kind, error) {
            (_, Some(_)) => {
                if self.kind == Kind::Flush || self.kind == (Kind::Write { durable: true }) {
                    *locked(&self.context.flush_failed) = error.cloned();
                }
                return stats.failed += 1;
            }
            (Kind::Flush, None) => return stats.flushes += 1,
            (Kind::Read, None) => &mut stats.read,
            (Kind::Write { .. }, None) => &mut stats.written,
        };
        moved.bytes += self.units;
        moved.operations += 1;
    }

    /// Keeps the error of a failed write for the next flush or `close`, unless a caller has received the error.
    fn store_unreported_error(&self, progress: &mut Progress) {
        if self.kind.writes()
            && !progress.reported
            && let Some(error) = &progress.error
        {
            locked(&self.context.unclaimed).get_or_insert(error.clone());
            progress.reported = true;
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.progress.lock().done
    }

    /// Waits until the operation has ended, with or without an error. Fails if `wait` ends first, or in a forked child.
    pub(crate) fn wait(&self, wait: &mut Wait<'_>) -> Result<()> {
        self.context.check_process()?;
        let what = || match self.kind {
            Kind::Flush => "a flush".into(),
            kind => format!("the {} of {} bytes at offset {}", kind.action(), self.units, self.offset),
        };
        let waited = self.progress.wait_until(wait, |progress| progress.done).map(drop);
        waited.map_err(|ended| Error::of_wait(ended, what))
    }

    /// Returns the result of an ended operation, and marks its error as reported; `None` while the operation runs.
    pub(crate) fn outcome(&self) -> Option<Result<()>> {
        let mut progress = self.progress.lock();
        progress.reported |= progress.done;
        progress.done.then(|| progress.error.clone().map_or(Ok(()), Err))
    }

    /// Records that the ticket was dropped. Does not stop the operation.
    pub(crate) fn ticket_dropped(&self) {
        let mut progress = self.progress.lock();
        progress.dropped = true;
        if progress.done {
            self.store_unreported_error(&mut progress);
        }
    }

    /// Takes the buffer out of the operation; `None` if the operation has no buffer, or an earlier call took it. Call
    /// `take_buffer` only once the operation has ended.
    pub(crate) fn take_buffer(&self) -> Option<Box<dyn Any + Send>> {
        locked(&self.buffer).take()
    }
}
