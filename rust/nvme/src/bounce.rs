//! Unaligned transfers: threads that copy through chunks and change the blocks at the edges.
//!
//! Each thread has one aligned chunk on huge pages and does one piece at a time: whole blocks are copied and written, or
//! read and copied; a part of a block is read, changed and written back while nobody else may touch that block. As many
//! threads as it takes to keep the device busy meanwhile.

use std::{
    ops::Range,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::JoinHandle,
};

use memascend_mem::{ChunkRing, Lease, OnFork, Pin, Region, Wait};

use crate::{
    Error, Result,
    backend::{Backend, block_signals},
    operation::{Address, Context, Kind, Operation},
    request::Job,
    stats::add,
    wait::locked,
};

/// What one thread moves at once: one request of the size that is fastest.
const CHUNK_BYTES: usize = 1 << 20;
/// Threads, each with a chunk. Copying takes about as long as the device's work, so twice the four chunks that keep a
/// device busy.
const THREADS: usize = 8;

/// Work for the threads.
enum Task {
    /// A part of an operation to be copied, piece by piece: the volume's bytes of it.
    Copy(Arc<Operation>, Range<u64>),
    /// An aligned part whose blocks were being changed when it came: it waits its turn here, and is not copied.
    Wait(Arc<Operation>, Range<u64>),
}

pub(crate) struct Bounce {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    context: Arc<Context>,
    backend: Arc<dyn Backend>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    tasks: std::collections::VecDeque<Task>,
    stop: bool,
}

impl Bounce {
    pub(crate) fn new(context: &Arc<Context>, backend: &Arc<dyn Backend>) -> Self {
        let (context, backend) = (Arc::clone(context), Arc::clone(backend));
        let shared = Shared { context, backend, state: Mutex::default(), changed: Condvar::new() };
        Self { shared: Arc::new(shared), threads: Mutex::default() }
    }

    /// Makes the chunks and starts the threads, the first time.
    pub(crate) fn ready(&self) -> Result<()> {
        let mut threads = locked(&self.threads);
        if threads.is_empty() {
            let memory = |error| Error::Memory(Arc::new(error));
            let region = Region::new(CHUNK_BYTES * THREADS, Pin::Off, OnFork::Wipe, "chunks of unaligned I/O")
                .map_err(memory)?;
            let chunks = ChunkRing::new(&region, CHUNK_BYTES, THREADS).map_err(memory)?;
            let owner = chunks.owner("unaligned I/O").map_err(memory)?;
            let mut started = Vec::new();
            for index in 0..THREADS {
                let chunk = chunks.lease(owner, Wait::never()).map_err(memory)?;
                let shared = Arc::clone(&self.shared);
                let thread = std::thread::Builder::new().name(format!("memascend-copy-{index}"));
                match thread.spawn(move || shared.serve(&chunk)) {
                    Ok(thread) => started.push(thread),
                    // Fewer do, as long as there is one.
                    Err(_) if !started.is_empty() => break,
                    Err(error) => return Err(Error::Invalid(format!("no thread could be started: {error}"))),
                }
            }
            *threads = started;
        }
        Ok(())
    }

    /// Copies `range` of an operation; after [`Bounce::ready`].
    pub(crate) fn copy(&self, operation: &Arc<Operation>, range: Range<u64>) {
        self.push(Task::Copy(Arc::clone(operation), range));
    }

    /// Writes the aligned `range` of an operation when its blocks are free; after [`Bounce::ready`].
    pub(crate) fn wait_and_write(&self, operation: &Arc<Operation>, range: Range<u64>) {
        self.push(Task::Wait(Arc::clone(operation), range));
    }

    fn push(&self, task: Task) {
        locked(&self.shared.state).tasks.push_back(task);
        self.shared.changed.notify_one();
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        locked(&self.shared.state).stop = true;
        self.shared.changed.notify_all();
        for thread in locked(&self.threads).drain(..) {
            drop(thread.join());
        }
    }
}

impl Shared {
    fn serve(&self, chunk: &Lease) {
        block_signals();
        while let Some(task) = self.next() {
            match task {
                Task::Wait(operation, range) => {
                    let hold = self.context.traffic.hold_shared(&range);
                    self.backend.submit(Job::new(operation.part(range, Some(hold))));
                }
                Task::Copy(operation, piece) => {
                    let result = if operation.is_failed() { Ok(()) } else { self.carry(&operation, &piece, chunk) };
                    operation.landed(piece.end - piece.start, result);
                }
            }
        }
    }

    /// The next piece to do, `None` at the end.
    fn next(&self) -> Option<Task> {
        let block = self.context.block_bytes as u64;
        let mut state = locked(&self.state);
        loop {
            match state.tasks.pop_front() {
                Some(Task::Copy(operation, range)) => {
                    // Pieces end at the end of a block, so that no two of one operation share one.
                    let end = range.end.min(range.start / block * block + CHUNK_BYTES as u64);
                    if end < range.end {
                        state.tasks.push_front(Task::Copy(Arc::clone(&operation), end..range.end));
                        self.changed.notify_one();
                    }
                    return Some(Task::Copy(operation, range.start..end));
                }
                Some(task) => return Some(task),
                None if state.stop => return None,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Moves one piece through the chunk.
    #[expect(clippy::cast_possible_truncation, reason = "a piece is at most a chunk")]
    fn carry(&self, operation: &Operation, piece: &Range<u64>, chunk: &Lease) -> Result<()> {
        let block = self.context.block_bytes as u64;
        let cover = piece.start / block * block..piece.end.next_multiple_of(block);
        let at = Address(chunk.as_ptr().as_ptr());
        let theirs = operation.address_of(piece.start);
        let ours = at.plus((piece.start - cover.start) as usize);
        let bytes = (piece.end - piece.start) as usize;
        add(&self.context.counters.bounced_bytes, bytes as u64);
        if operation.kind == Kind::Read {
            self.transfer(Kind::Read, cover, at)?;
            // SAFETY: the operation owns its buffer until this piece has landed; the chunk is this thread's alone.
            unsafe { std::ptr::copy_nonoverlapping(ours.0, theirs.0, bytes) };
            return Ok(());
        }
        let (head, tail) = (piece.start != cover.start, piece.end != cover.end);
        let traffic = &self.context.traffic;
        let hold = if head || tail { traffic.hold_alone(&cover) } else { traffic.hold_shared(&cover) };
        let result = self.edges(&cover, head, tail, at).and_then(|()| {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(theirs.0, ours.0, bytes) };
            self.transfer(operation.kind, cover, at)
        });
        traffic.release(hold);
        result
    }

    /// Reads the first and the last block of `cover` where the piece does not cover them itself.
    #[expect(clippy::cast_possible_truncation, reason = "inside a chunk")]
    fn edges(&self, cover: &Range<u64>, head: bool, tail: bool, at: Address) -> Result<()> {
        let block = self.context.block_bytes as u64;
        if head {
            self.transfer(Kind::Read, cover.start..cover.start + block, at)?;
        }
        let last = cover.end - block;
        if tail && !(head && last == cover.start) {
            self.transfer(Kind::Read, last..cover.end, at.plus((last - cover.start) as usize))?;
        }
        Ok(())
    }

    fn transfer(&self, kind: Kind, range: Range<u64>, at: Address) -> Result<()> {
        let aside = Operation::aside(&self.context, kind, range, at);
        self.backend.submit(Job::new(Arc::clone(&aside)));
        aside.wait(&mut Wait::forever())?;
        aside.outcome().unwrap_or(Ok(()))
    }
}
