//! Tracks one operation on a volume: what it moves, how much is open, and who waits for it.

use std::{
    any::Any,
    ops::Range,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use memascend_mem::{Guarded, Wait, locked};

use crate::{
    Error, Lane, Result, Trace,
    align::Alignment,
    backend::Backend,
    error::Action,
    fork::Owned,
    request::Job,
    stats::{Counters, add},
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

    fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write { .. } => "write",
            Self::Flush => "flush",
        }
    }

    pub(crate) fn writes(self) -> bool {
        matches!(self, Self::Write { .. })
    }
}

/// What all operations of a volume share.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) owned: Owned,
    pub(crate) paths: Box<[Arc<Path>]>,
    pub(crate) striping: Striping,
    /// What offsets and lengths on a device must be multiples of.
    pub(crate) block_bytes: usize,
    /// What addresses must be multiples of.
    pub(crate) memory_align: usize,
    pub(crate) traffic: Traffic,
    pub(crate) counters: Counters,
    pub(crate) trace: Trace,
    /// The failure of a write whose ticket nobody held any more; the next flush or the close tells it.
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
            owned: Owned::here(),
            paths: paths.into(),
            striping,
            block_bytes: alignment.block,
            memory_align: alignment.memory,
            traffic: Traffic::default(),
            counters: Counters::default(),
            trace: Trace::new(),
            unclaimed: Mutex::default(),
            flush_failed: Mutex::default(),
        })
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
    /// When a caller's operation came, if a trace is recorded.
    began: Option<Instant>,
    /// Units whose fate is not known yet.
    open: AtomicU64,
    failed: AtomicBool,
    marks: Marks,
    state: Guarded<State>,
    /// What must live until the end. The kernel may write to it, so nothing else drops it before.
    buffer: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Debug, Default)]
struct State {
    done: bool,
    error: Option<Error>,
    /// Somebody was told of the error.
    told: bool,
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
            began: marks.begun.and_then(|_| context.trace.mark()),
            open: AtomicU64::new(units),
            failed: AtomicBool::new(false),
            marks,
            state: Guarded::default(),
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
            self.state.lock().error.get_or_insert(error);
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
        let mut state = self.state.lock();
        let error = state.error.clone();
        // Before anybody can know that it has ended: whoever then asks finds everything of it settled.
        if state.dropped {
            self.leave_word(&mut state);
        }
        if let Some(hold) = self.marks.hold {
            context.traffic.release(hold);
        }
        if let Some(begun) = self.marks.begun {
            self.count(error.as_ref());
            context.trace.operation(self.kind.name(), self.began, (self.offset, self.units));
            context.traffic.end(begun);
        }
        state.done = true;
        drop(state);
        self.state.notify_all();
        if let Some(whole) = &self.marks.whole {
            whole.landed(self.units, error.map_or(Ok(()), Err));
        }
    }

    fn count(&self, error: Option<&Error>) {
        let counters = &self.context.counters;
        let moved = match (self.kind, error) {
            (_, Some(_)) => {
                if self.kind == Kind::Flush || self.kind == (Kind::Write { durable: true }) {
                    *locked(&self.context.flush_failed) = error.cloned();
                }
                return add(&counters.failed, 1);
            }
            (Kind::Flush, None) => return add(&counters.flushes, 1),
            (Kind::Read, None) => &counters.read,
            (Kind::Write { .. }, None) => &counters.written,
        };
        add(&moved.bytes, self.units);
        add(&moved.operations, 1);
    }

    /// The error of a write that nobody will ask for is kept for the next flush.
    fn leave_word(&self, state: &mut State) {
        if self.kind.writes()
            && !state.told
            && let Some(error) = &state.error
        {
            locked(&self.context.unclaimed).get_or_insert(error.clone());
            state.told = true;
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.state.lock().done
    }

    /// Waits for the end, however it is.
    pub(crate) fn wait(&self, wait: &mut Wait<'_>) -> Result<()> {
        self.context.owned.check()?;
        let what = || match self.kind {
            Kind::Flush => "a flush".into(),
            kind => format!("the {} of {} bytes at offset {}", kind.action(), self.units, self.offset),
        };
        let waited = self.state.wait_until(wait, |state| state.done).map(drop);
        waited.map_err(|ended| Error::of_wait(ended, what))
    }

    /// How it ended, once it has.
    pub(crate) fn outcome(&self) -> Option<Result<()>> {
        let mut state = self.state.lock();
        state.told |= state.done;
        state.done.then(|| state.error.clone().map_or(Ok(()), Err))
    }

    /// The ticket is gone; the operation goes on.
    pub(crate) fn ticket_dropped(&self) {
        let mut state = self.state.lock();
        state.dropped = true;
        if state.done {
            self.leave_word(&mut state);
        }
    }

    /// The buffer, for whoever knows that the operation is done.
    pub(crate) fn take_buffer(&self) -> Option<Box<dyn Any + Send>> {
        locked(&self.buffer).take()
    }
}

/// Moves `range` between `address` and the volume for a thread that waits for it.
pub(crate) fn transfer(
    context: &Arc<Context>,
    backend: &dyn Backend,
    what: (Kind, Lane),
    range: Range<u64>,
    address: Address,
) -> Result<()> {
    let aside = Operation::aside(context, what, range, address);
    backend.submit(Job::new(Arc::clone(&aside)));
    aside.wait(&mut Wait::forever())?;
    aside.outcome().unwrap_or(Ok(()))
}
