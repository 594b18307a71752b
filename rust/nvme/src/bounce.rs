//! Copies unaligned transfers through aligned chunks, on threads.
//!
//! Each thread has one aligned chunk on huge pages and does one piece at a time: whole blocks are copied and written, or
//! read and copied. As many threads as it takes to keep the device busy meanwhile. Parts of blocks go to `edges`.

use std::{
    ops::Range,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::JoinHandle,
};

use memascend_mem::{ChunkRing, Lease, OnFork, Pin, Region, Wait};

use crate::{
    Error, Result,
    backend::{Backend, block_signals},
    edges::{EDGE_THREADS, Edges},
    error::contained,
    operation::{Address, Context, Kind, Operation, transfer},
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
    edges: Arc<Edges>,
    threads: Mutex<Started>,
}

#[derive(Default)]
struct Started {
    copying: Vec<JoinHandle<()>>,
    changing: Vec<JoinHandle<()>>,
    /// Of the memory of them all.
    bytes: usize,
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
        let edges = Arc::new(Edges::new(context, backend));
        let (context, backend) = (Arc::clone(context), Arc::clone(backend));
        let shared = Shared { context, backend, state: Mutex::default(), changed: Condvar::new() };
        Self { shared: Arc::new(shared), edges, threads: Mutex::default() }
    }

    /// Makes the chunks and starts the threads, the first time.
    pub(crate) fn ready(&self) -> Result<()> {
        let context = &self.shared.context;
        let mut threads = locked(&self.threads);
        if threads.copying.is_empty() {
            let chunks = rooms(CHUNK_BYTES, THREADS, "chunks of unaligned I/O")?;
            threads.bytes += CHUNK_BYTES * THREADS;
            threads.copying = start("copy", chunks, &self.shared, Shared::serve)?;
        }
        if threads.changing.is_empty() {
            let block_bytes = context.block_bytes.max(context.memory_align);
            let blocks = rooms(block_bytes, EDGE_THREADS, "blocks of unaligned I/O")?;
            threads.bytes += block_bytes * EDGE_THREADS;
            threads.changing = start("edge", blocks, &self.edges, Edges::serve)?;
        }
        Ok(())
    }

    /// Bytes of memory that it holds: none before the first unaligned transfer.
    pub(crate) fn bytes(&self) -> usize {
        locked(&self.threads).bytes
    }

    /// Copies `range` of an operation; after [`Bounce::ready`].
    pub(crate) fn copy(&self, operation: &Arc<Operation>, range: Range<u64>) {
        self.push(Task::Copy(Arc::clone(operation), range));
    }

    /// Writes the aligned `range` of an operation when its blocks are free; after [`Bounce::ready`].
    pub(crate) fn wait_and_write(&self, operation: &Arc<Operation>, range: Range<u64>) {
        self.push(Task::Wait(Arc::clone(operation), range));
    }

    /// Writes `range` of an operation, a part of a block or of two; after [`Bounce::ready`].
    pub(crate) fn change(&self, operation: &Arc<Operation>, range: &Range<u64>) {
        self.edges.write(operation, range);
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
        self.edges.stop();
        let Started { copying, changing, .. } = std::mem::take(&mut *locked(&self.threads));
        for thread in copying.into_iter().chain(changing) {
            drop(thread.join());
        }
    }
}

/// Room for each of `count` threads, aligned for the device.
fn rooms(room_bytes: usize, count: usize, what: &str) -> Result<Vec<Lease>> {
    let memory = |error| Error::Memory(Arc::new(error));
    let region = Region::new(room_bytes * count, Pin::Off, OnFork::Wipe, what).map_err(memory)?;
    let rooms = ChunkRing::new(&region, room_bytes, count).map_err(memory)?;
    let owner = rooms.owner("unaligned I/O").map_err(memory)?;
    (0..count).map(|_| rooms.lease(owner, Wait::never()).map_err(memory)).collect()
}

/// Starts a thread in each room, or as many as can be had.
fn start<T: Send + Sync + 'static>(
    name: &str,
    rooms: Vec<Lease>,
    with: &Arc<T>,
    serve: fn(&T, &Lease),
) -> Result<Vec<JoinHandle<()>>> {
    let mut started = Vec::new();
    for (index, room) in rooms.into_iter().enumerate() {
        let with = Arc::clone(with);
        match std::thread::Builder::new().name(format!("memascend-{name}-{index}")).spawn(move || serve(&with, &room)) {
            Ok(thread) => started.push(thread),
            // Fewer do, as long as there is one.
            Err(_) if !started.is_empty() => break,
            Err(error) => return Err(Error::Invalid(format!("no thread could be started: {error}"))),
        }
    }
    Ok(started)
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
                    let carried = || if operation.is_failed() { Ok(()) } else { self.carry(&operation, &piece, chunk) };
                    let result = contained(carried);
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

    /// Moves one piece through the chunk. A piece that is written is whole blocks.
    #[expect(clippy::cast_possible_truncation, reason = "a piece is at most a chunk")]
    fn carry(&self, operation: &Operation, piece: &Range<u64>, chunk: &Lease) -> Result<()> {
        let (context, backend) = (&self.context, &*self.backend);
        let block = context.block_bytes as u64;
        let at = Address(chunk.as_ptr().as_ptr());
        let theirs = operation.address_of(piece.start);
        let bytes = (piece.end - piece.start) as usize;
        add(&context.counters.bounced_bytes, bytes as u64);
        if operation.kind == Kind::Read {
            let cover = piece.start / block * block..piece.end.next_multiple_of(block);
            let ours = at.plus((piece.start - cover.start) as usize);
            transfer(context, backend, (Kind::Read, operation.lane), cover, at)?;
            // SAFETY: the operation owns its buffer until this piece has landed; the chunk is this thread's alone.
            unsafe { std::ptr::copy_nonoverlapping(ours.0, theirs.0, bytes) };
            return Ok(());
        }
        debug_assert!(piece.start.is_multiple_of(block) && piece.end.is_multiple_of(block));
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(theirs.0, at.0, bytes) };
        let hold = context.traffic.hold_shared(piece);
        let result = contained(|| transfer(context, backend, (operation.kind, operation.lane), piece.clone(), at));
        context.traffic.release(hold);
        result
    }
}
