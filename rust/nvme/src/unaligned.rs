//! Performs unaligned reads and writes: dedicated threads copy the bytes through aligned chunks of memory.
//!
//! Each thread has one chunk (on huge pages if possible) and moves one piece of an operation at a time. If a piece of a
//! write does not fill its first or last block, the thread reads this block into the chunk, copies the new bytes into
//! the chunk and writes all blocks of the piece. During these steps the thread has an alone hold on these blocks (see
//! [Note: block holds] in `traffic.rs`).

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

use memascend_mem::{ChunkRing, Guarded, Lease, OnFork, Pin, Region, Wait, locked};

use crate::{
    Error, Result,
    backend::{Backend, block_signals},
    error::catch_panic,
    operation::{Address, Context, Kind, Operation},
    request::Job,
};

/// Bytes that one thread moves at a time: one request of the size at which disks are fastest.
const CHUNK_BYTES: usize = 1 << 20;
/// The number of threads. Each thread has one chunk. Four chunks in transfer keep a device busy. Copying a chunk takes
/// about as long as its transfer, so eight threads keep about four chunks in transfer.
const THREADS: usize = 8;

/// The copy threads. The first unaligned transfer starts them.
pub(crate) struct Unaligned {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    context: Arc<Context>,
    backend: Arc<dyn Backend>,
    backlog: Guarded<Backlog>,
}

#[derive(Default)]
struct Backlog {
    /// Parts of operations that wait for a thread, with their ranges of the volume.
    parts: VecDeque<(Arc<Operation>, Range<u64>)>,
    stop: bool,
}

impl Unaligned {
    pub(crate) fn new(context: &Arc<Context>, backend: &Arc<dyn Backend>) -> Self {
        let (context, backend) = (Arc::clone(context), Arc::clone(backend));
        Self { shared: Arc::new(Shared { context, backend, backlog: Guarded::default() }), threads: Mutex::default() }
    }

    /// Allocates the chunks and starts the threads, unless an earlier call has started them.
    pub(crate) fn ready(&self) -> Result<()> {
        let mut threads = locked(&self.threads);
        if !threads.is_empty() {
            return Ok(());
        }
        for (index, chunk) in chunks()?.into_iter().enumerate() {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name(format!("memascend-copy-{index}"));
            match thread.spawn(move || shared.serve(&chunk)) {
                Ok(thread) => threads.push(thread),
                // Fewer threads work too: continue if at least one thread has started.
                Err(_) if !threads.is_empty() => break,
                Err(error) => {
                    return Err(Error::Invalid(format!(
                        "could not start a thread for unaligned transfers: {error}; end other threads, or raise \
                         `ulimit -u`"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Bytes of the chunks: 0 before the first unaligned transfer.
    pub(crate) fn bytes(&self) -> usize {
        if locked(&self.threads).is_empty() { 0 } else { CHUNK_BYTES * THREADS }
    }

    /// Queues `range` of an operation for the copy threads. Call [`Unaligned::ready`] first.
    pub(crate) fn copy(&self, operation: &Arc<Operation>, range: Range<u64>) {
        self.shared.backlog.lock().parts.push_back((Arc::clone(operation), range));
        self.shared.backlog.notify_one();
    }
}

impl Drop for Unaligned {
    fn drop(&mut self) {
        self.shared.backlog.lock().stop = true;
        self.shared.backlog.notify_all();
        for thread in std::mem::take(&mut *locked(&self.threads)) {
            drop(thread.join());
        }
    }
}

/// Allocates a chunk for each thread, aligned for every device.
fn chunks() -> Result<Vec<Lease>> {
    let memory = |error| Error::Memory(Arc::new(error));
    let region = Region::new(CHUNK_BYTES * THREADS, Pin::Off, OnFork::Wipe, "unaligned I/O").map_err(memory)?;
    let chunks = ChunkRing::new(&region, CHUNK_BYTES, THREADS).map_err(memory)?;
    let owner = chunks.owner("unaligned I/O").map_err(memory)?;
    (0..THREADS).map(|_| chunks.lease(owner, Wait::never()).map_err(memory)).collect()
}

impl Shared {
    fn serve(&self, chunk: &Lease) {
        block_signals();
        while let Some((operation, piece)) = self.next() {
            let carried = || if operation.is_failed() { Ok(()) } else { self.carry(&operation, &piece, chunk) };
            let result = catch_panic(carried);
            operation.complete_units(piece.end - piece.start, result);
        }
    }

    /// Takes the next piece of an operation; `None` once the threads must stop and no part is left.
    fn next(&self) -> Option<(Arc<Operation>, Range<u64>)> {
        let mut backlog = self.backlog.when(|backlog| backlog.stop || !backlog.parts.is_empty());
        let (operation, range) = backlog.parts.pop_front()?;
        // A piece that does not end its part ends at the end of a block, so that no two pieces of one operation share a
        // block.
        let end = range.end.min(self.blocks_of(&range).start + CHUNK_BYTES as u64);
        if end < range.end {
            backlog.parts.push_front((Arc::clone(&operation), end..range.end));
            drop(backlog);
            self.backlog.notify_one();
        }
        Some((operation, range.start..end))
    }

    /// Returns the blocks that `range` touches.
    fn blocks_of(&self, range: &Range<u64>) -> Range<u64> {
        let block = self.context.block_bytes as u64;
        range.start / block * block..range.end.next_multiple_of(block)
    }

    /// Moves one piece through the chunk.
    #[expect(clippy::cast_possible_truncation, reason = "a piece is at most a chunk")]
    fn carry(&self, operation: &Operation, piece: &Range<u64>, chunk: &Lease) -> Result<()> {
        let blocks = self.blocks_of(piece);
        let at = |offset: u64| Address(chunk.as_ptr().as_ptr()).plus((offset - blocks.start) as usize);
        let (ours, theirs) = (at(piece.start), operation.address_of(piece.start));
        let bytes = (piece.end - piece.start) as usize;
        locked(&self.context.stats).bounced_bytes += bytes as u64;
        if operation.kind == Kind::Read {
            self.transfer(Kind::Read, operation, blocks.clone(), at(blocks.start))?;
            // SAFETY: the operation owns its buffer until the result of this piece is recorded, and only this thread
            // uses the chunk.
            unsafe { std::ptr::copy_nonoverlapping(ours.0, theirs.0, bytes) };
            return Ok(());
        }
        let traffic = &self.context.traffic;
        let hold = if *piece == blocks { traffic.hold_shared(piece) } else { traffic.hold_alone(&blocks) };
        let result = catch_panic(|| {
            let block = self.context.block_bytes as u64;
            let (first, last) = (blocks.start..blocks.start + block, blocks.end - block..blocks.end);
            if first.start < piece.start || first.end > piece.end {
                self.transfer(Kind::Read, operation, first.clone(), at(first.start))?;
            }
            if last != first && last.end > piece.end {
                self.transfer(Kind::Read, operation, last.clone(), at(last.start))?;
            }
            // SAFETY: only this thread uses the chunk, and the reads into the chunk have ended. The operation owns its
            // buffer until the result of this piece is recorded.
            unsafe { std::ptr::copy_nonoverlapping(theirs.0, ours.0, bytes) };
            self.transfer(operation.kind, operation, blocks.clone(), at(blocks.start))
        });
        traffic.release(hold);
        result
    }

    /// Moves `range` between `address` and the volume, and waits until the transfer has ended.
    fn transfer(&self, kind: Kind, of: &Operation, range: Range<u64>, address: Address) -> Result<()> {
        let internal_transfer = Operation::internal_transfer(&self.context, (kind, of.lane), range, address);
        self.backend.submit(Job::new(Arc::clone(&internal_transfer)));
        internal_transfer.wait(&mut Wait::forever())?;
        internal_transfer.outcome().unwrap_or(Ok(()))
    }
}
