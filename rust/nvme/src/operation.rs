//! Tracks one operation on a volume: what it moves, how much is open, and who waits for it.

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

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    /// `durable`: done only when the bytes are on the medium (`RWF_DSYNC`).
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

/// The order in which waiting requests are given to the devices. What a device has already is not called back, so a
/// request of the first lane waits for at most the queue depth.
///
/// Nothing ages from the second lane into the first: whoever uses the first bounds what is in it. Prefetched units are
/// bounded by the memory that they are read into, and each is read once for the computation that needs it, so between two
/// of them the second lane always has its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lane {
    /// What somebody waits for, or soon will.
    First,
    /// Everything else.
    #[default]
    Second,
}

/// What all operations of a volume share.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) maker: Maker,
    pub(crate) paths: Box<[Arc<Path>]>,
    pub(crate) striping: Striping,
    /// What offsets and lengths on a device must be multiples of.
    pub(crate) block_bytes: usize,
    /// What addresses must be multiples of.
    pub(crate) memory_align: usize,
    pub(crate) traffic: Traffic,
    pub(crate) stats: Mutex<VolumeStats>,
    /// The failure of a write whose ticket was dropped; the next flush or the close reports it.
    pub(crate) unclaimed: Mutex<Option<Error>>,
    /// The first failed flush. What the kernel lost then it will not write again, so no later flush may succeed.
    pub(crate) flush_failed: Mutex<Option<Error>>,
}

/// Where an operation's bytes are in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Address(pub(crate) *mut u8);

// SAFETY: an address; who may touch the bytes is the contract of `Buffer`.
unsafe impl Send for Address {}
// SAFETY: as above.
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

    /// Refuses to work in a forked child.
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.maker.is_elsewhere() { Err(Error::Forked) } else { Ok(()) }
    }
}

/// What an operation gives back at its end.
#[derive(Debug, Default)]
struct Marks {
    /// It is a caller's.
    begun: Option<Begun>,
    /// On the blocks that it writes.
    hold: Option<Hold>,
    /// It is a part of another.
    whole: Option<Arc<Operation>>,
}

#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) context: Arc<Context>,
    pub(crate) kind: Kind,
    pub(crate) lane: Lane,
    /// Where in the volume.
    pub(crate) offset: u64,
    /// What is to be moved; for a flush, the number of devices.
    pub(crate) units: u64,
    pub(crate) address: Address,
    /// Units whose fate is not known yet.
    open: AtomicU64,
    failed: AtomicBool,
    marks: Marks,
    progress: Guarded<Progress>,
    /// What must live until the end. The kernel may write to it, so nothing else drops it before.
    buffer: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Debug, Default)]
struct Progress {
    done: bool,
    error: Option<Error>,
    /// Somebody has seen the error.
    reported: bool,
    /// The ticket is gone.
    dropped: bool,
}

impl Operation {
    /// A caller's operation on `(offset, units)`. `buffer` is what `address` points into.
    pub(crate) fn new(
        context: &Arc<Context>,
        (kind, lane): (Kind, Lane),
        place: (u64, u64),
        address: Address,
        (begun, hold): (Begun, Option<Hold>),
        buffer: Option<Box<dyn Any + Send>>,
    ) -> Arc<Self> {
        Self::with(context, (kind, lane), place, address, Marks { begun: Some(begun), hold, whole: None }, buffer)
    }

    /// A part of this operation that ends by itself and then counts for it. Releases `hold` at its end.
    pub(crate) fn part(self: &Arc<Self>, range: Range<u64>, hold: Option<Hold>) -> Arc<Self> {
        let at = self.address_of(range.start);
        let marks = Marks { begun: None, hold, whole: Some(Arc::clone(self)) };
        Self::with(&self.context, (self.kind, self.lane), (range.start, range.end - range.start), at, marks, None)
    }

    /// A transfer of its own between `address` and the volume, on behalf of whoever waits for it.
    pub(crate) fn aside(context: &Arc<Context>, what: (Kind, Lane), range: Range<u64>, address: Address) -> Arc<Self> {
        Self::with(context, what, (range.start, range.end - range.start), address, Marks::default(), None)
    }

    fn with(
        context: &Arc<Context>,
        (kind, lane): (Kind, Lane),
        (offset, units): (u64, u64),
        address: Address,
        marks: Marks,
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

    /// Where in memory the volume's byte at `offset` goes.
    #[expect(clippy::cast_possible_truncation, reason = "inside the buffer, whose length is a usize")]
    pub(crate) fn address_of(&self, offset: u64) -> Address {
        self.address.plus((offset - self.offset) as usize)
    }

    /// A part has failed already, so the rest need not be tried.
    pub(crate) fn is_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// The fate of `units` is known. The last one ends the operation.
    pub(crate) fn landed(&self, units: u64, result: Result<()>) {
        if let Err(error) = result {
            self.failed.store(true, Ordering::Relaxed);
            self.progress.lock().error.get_or_insert(error);
        }
        if self.open.fetch_sub(units, Ordering::AcqRel) == units {
            self.finish();
        }
    }

    /// Ends an operation without units.
    pub(crate) fn finish_empty(&self) {
        debug_assert_eq!(self.units, 0);
        self.finish();
    }

    fn finish(&self) {
        let context = &*self.context;
        let mut progress = self.progress.lock();
        let error = progress.error.clone();
        // Before anybody can know that it has ended: whoever then asks finds everything of it settled.
        if progress.dropped {
            self.leave_word(&mut progress);
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
            whole.landed(self.units, error.map_or(Ok(()), Err));
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

    /// The error of a write that nobody will ask for is kept for the next flush.
    fn leave_word(&self, progress: &mut Progress) {
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

    /// Waits for the end, however it is.
    pub(crate) fn wait(&self, wait: &mut Wait<'_>) -> Result<()> {
        self.context.check_process()?;
        let what = || match self.kind {
            Kind::Flush => "a flush".into(),
            kind => format!("the {} of {} bytes at offset {}", kind.action(), self.units, self.offset),
        };
        let waited = self.progress.wait_until(wait, |progress| progress.done).map(drop);
        waited.map_err(|ended| Error::of_wait(ended, what))
    }

    /// How it ended, once it has.
    pub(crate) fn outcome(&self) -> Option<Result<()>> {
        let mut progress = self.progress.lock();
        progress.reported |= progress.done;
        progress.done.then(|| progress.error.clone().map_or(Ok(()), Err))
    }

    /// The ticket is gone; the operation goes on.
    pub(crate) fn ticket_dropped(&self) {
        let mut progress = self.progress.lock();
        progress.dropped = true;
        if progress.done {
            self.leave_word(&mut progress);
        }
    }

    /// The buffer, for whoever knows that the operation is done.
    pub(crate) fn take_buffer(&self) -> Option<Box<dyn Any + Send>> {
        locked(&self.buffer).take()
    }
}
