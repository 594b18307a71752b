//! Gives every kind of job its workbench: the store, staging chunks, counted reads and writes.

use std::{cell::RefCell, num::NonZeroUsize, ops::Range, sync::Arc};

use memascend_math::{Exec, FloatsMut};
use memascend_mem::Wait;
use memascend_store::{
    Buffer, Content, Description, Dtype, PAGE_BYTES, PieceRead, Scratch, Shared, SpillRead, StepWrite, Store, Transfer,
};

pub(crate) use crate::gradient::floats;
use crate::{
    Counters, Error, Result,
    turn::{Mark, Turn},
};

/// Where the parts of a staging chunk are: a chunk's state (or a part of a tensor of another shape), its values, its
/// gradient where one may spill.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    values_at: usize,
    gradient_at: usize,
    bytes: usize,
}

impl Parts {
    pub(crate) fn new(description: &Description) -> Self {
        let size = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        let (state, values) = description.staging_bytes();
        let chunk = u64::from(description.chunk_elements);
        let spills =
            description.entries.iter().filter_map(|entry| Some(entry.spill?.bytes() * entry.elements().min(chunk)));
        let gradient = spills.max().unwrap_or(0).next_multiple_of(PAGE_BYTES);
        Self {
            values_at: size(state),
            gradient_at: size(state + values),
            bytes: size(state + values + gradient).max(1),
        }
    }

    /// Bytes of a staging chunk.
    pub(crate) fn bytes(self) -> usize {
        self.bytes
    }
}

/// Bytes of one staging chunk of an engine on a store of this description.
#[must_use]
pub fn chunk_bytes(description: &Description) -> u64 {
    Parts::new(description).bytes as u64
}

/// A piece that is being read into a part of a staging chunk.
pub(crate) enum Read<'a> {
    Values(PieceRead<'a, Shared>),
    State(PieceRead<'a, Shared>),
    Gradient(SpillRead<'a, Shared>),
}

/// A piece that is being written from a part of a staging chunk.
pub(crate) enum Write<'a> {
    Step(StepWrite<'a, Shared>),
    Gradient(Transfer<Shared>),
}

impl Write<'_> {
    pub(crate) fn wait(self) -> Result<()> {
        match self {
            Self::Step(write) => drop(write.wait()?),
            Self::Gradient(write) => drop(write.wait()?),
        }
        Ok(())
    }
}

pub(crate) struct Workbench<'a> {
    pub(crate) store: &'a Store,
    pub(crate) parts: Parts,
    pub(crate) exec: Exec,
    pub(crate) counters: Counters,
    /// For state of other shapes than its entry's, where there is any.
    pub(crate) others: Option<Scratch>,
    /// For entries in one piece, the smaller slots first.
    pub(crate) whole: Vec<Scratch>,
    /// The job that is being begun.
    pub(crate) beginning: RefCell<Option<Arc<Mark>>>,
    pieces: Pieces,
}

/// Where the pieces of an entry are that is worked on.
enum Pieces {
    /// In staging chunks.
    Staged,
    /// Where they are held.
    Held,
    /// The values and the state of the one chunk that there is.
    Given(Shared, Option<Shared>),
}

impl<'a> Workbench<'a> {
    pub(crate) fn new(store: &'a Store, others: Option<Scratch>, whole: Vec<Scratch>) -> Result<Self> {
        let parts = Parts::new(store.description());
        let exec = Exec::new(NonZeroUsize::MIN)?;
        let (counters, beginning) = (Counters::default(), RefCell::default());
        Ok(Self { store, parts, exec, counters, others, whole, beginning, pieces: Pieces::Staged })
    }

    /// For work on held entries where they lie: what would be a part of a staging chunk is the held piece.
    pub(crate) fn in_place(store: &'a Store) -> Result<Self> {
        Ok(Self { pieces: Pieces::Held, ..Self::new(store, None, Vec::new())? })
    }

    /// For work on one chunk, whose two pieces are given.
    pub(crate) fn on_chunk(store: &'a Store, values: Shared, state: Option<Shared>) -> Result<Self> {
        Ok(Self { pieces: Pieces::Given(values, state), ..Self::new(store, None, Vec::new())? })
    }

    /// Begins to stage an entry. Somebody may read its slot for long: a job that is cancelled waits no more.
    pub(crate) fn begin(&self, entry: usize, step: u64) -> Result<()> {
        self.waiting(|wait| self.store.begin(entry, step, wait))
    }

    /// Begins to stage a held entry as it is.
    pub(crate) fn begin_snapshot(&self, entry: usize) -> Result<()> {
        self.waiting(|wait| self.store.begin_snapshot(entry, wait))
    }

    fn waiting(&self, begin: impl FnOnce(Wait<'_>) -> memascend_store::Result<()>) -> Result<()> {
        let mut wanted = || self.beginning.borrow().as_ref().is_none_or(|mark| !mark.is_cancelled());
        Ok(begin(Wait { timeout: None, keep_waiting: Some(&mut wanted) })?)
    }

    pub(crate) fn chunks_of(&self, entry: usize) -> u32 {
        self.store.layout().chunks_of(entry)
    }

    /// The pieces of a chunk: of its values, and of its state where it has one.
    pub(crate) fn pieces_of_chunk(&self, entry: usize, chunk: u32) -> impl Iterator<Item = u32> + use<> {
        std::iter::once(chunk).chain(self.state_piece(entry, chunk))
    }

    /// The piece of a chunk's state, where it has any.
    pub(crate) fn state_piece(&self, entry: usize, chunk: u32) -> Option<u32> {
        self.has_chunked_state(entry).then_some(self.chunks_of(entry) + chunk)
    }

    /// The first piece of what is not cut into chunks.
    pub(crate) fn first_other_piece(&self, entry: usize) -> u32 {
        let chunks = self.chunks_of(entry);
        if self.has_chunked_state(entry) { 2 * chunks } else { chunks }
    }

    fn has_chunked_state(&self, entry: usize) -> bool {
        self.chunks_of(entry) > 0 && self.store.description().entries[entry].chunked().next().is_some()
    }

    /// The elements of a chunk, in the entry's own order.
    pub(crate) fn elements(&self, entry: usize, chunk: u32) -> Range<usize> {
        let description = self.store.description();
        let start = chunk as usize * description.chunk_elements as usize;
        start..start + description.elements_of_chunk(entry, chunk)
    }

    /// The part of a staging chunk that is for a piece.
    pub(crate) fn part(&self, entry: usize, piece: u32, memory: &Shared) -> Result<Shared> {
        match &self.pieces {
            Pieces::Staged => {}
            Pieces::Held => return self.held_piece(entry, piece),
            Pieces::Given(values, _) if piece < self.chunks_of(entry) => return Ok(values.clone()),
            Pieces::Given(_, state) => {
                let lacks = || Error::Invalid("a chunk without state".into());
                return state.clone().ok_or_else(lacks);
            }
        }
        let place = self.store.layout().piece(self.store.description(), entry, piece);
        let start = if matches!(place.content, Content::Values { .. }) { self.parts.values_at } else { 0 };
        let part = memory.part(start, usize::try_from(place.bytes()).unwrap_or(usize::MAX));
        part.ok_or_else(|| Error::Invalid("a piece is larger than a staging chunk".into()))
    }

    /// Begins to read a piece into its part of a staging chunk.
    pub(crate) fn read(&self, entry: usize, piece: u32, memory: &Shared) -> Result<Read<'a>> {
        self.read_into(entry, piece, self.part(entry, piece, memory)?)
    }

    /// Begins to read a piece into memory of its size.
    pub(crate) fn read_into(&self, entry: usize, piece: u32, part: Shared) -> Result<Read<'a>> {
        let read = self.store.read(entry, piece, part)?;
        Ok(if piece < self.chunks_of(entry) { Read::Values(read) } else { Read::State(read) })
    }

    /// Copies a piece from where it is held to memory of its size.
    pub(crate) fn take_held(&self, entry: usize, piece: u32, part: &Shared) -> Result<()> {
        let held = self.held_piece(entry, piece)?;
        // SAFETY: nobody changes what is held but an update, and this is one.
        let from = unsafe { bytes_mut(&held) };
        // SAFETY: the part is the caller's, and apart from what is held.
        unsafe { bytes_mut(part) }.copy_from_slice(from);
        Ok(())
    }

    /// Copies a piece to where it is held.
    pub(crate) fn put_held(&self, entry: usize, piece: u32, part: &Shared) -> Result<()> {
        let held = self.held_piece(entry, piece)?;
        // SAFETY: as above.
        let into = unsafe { bytes_mut(&held) };
        // SAFETY: as above.
        into.copy_from_slice(unsafe { bytes_mut(part) });
        Ok(())
    }

    fn held_piece(&self, entry: usize, piece: u32) -> Result<Shared> {
        let held = self.store.held_piece(entry, piece);
        held.ok_or_else(|| Error::Invalid("an entry that is not held".into()))
    }

    /// Waits for a read, checks it, and counts it.
    pub(crate) fn arrived(&mut self, read: Read<'a>) -> Result<()> {
        match read {
            Read::Values(read) => {
                let bytes = read.storage_bytes();
                read.wait()?;
                self.counters.values_read += bytes;
            }
            Read::State(read) => {
                let bytes = read.storage_bytes();
                read.wait()?;
                self.counters.state_read += bytes;
            }
            Read::Gradient(read) => self.counters.spill_read += read.wait()?.len() as u64,
        }
        Ok(())
    }

    /// Begins to stage a piece from its part of a staging chunk.
    pub(crate) fn stage(&mut self, entry: usize, piece: u32, memory: &Shared) -> Result<Write<'a>> {
        self.stage_from(entry, piece, self.part(entry, piece, memory)?)
    }

    /// Begins to stage a chunk's values and state from their parts of a staging chunk.
    pub(crate) fn stage_chunk(&mut self, entry: usize, chunk: u32, memory: &Shared) -> Result<Vec<Write<'a>>> {
        let state = self.state_piece(entry, chunk).map(|piece| self.stage(entry, piece, memory));
        let values = self.stage(entry, chunk, memory);
        // Both are kept if one failed: dropping a write waits for it.
        state.into_iter().chain([values]).collect()
    }

    /// Begins to stage a piece from memory of its size.
    pub(crate) fn stage_from(&mut self, entry: usize, piece: u32, part: Shared) -> Result<Write<'a>> {
        let bytes = part.len() as u64;
        let write = self.store.stage(entry, piece, part)?;
        self.count_written(entry, piece, bytes);
        Ok(Write::Step(write))
    }

    /// Begins to stage a piece from where it is held.
    pub(crate) fn stage_held(&mut self, entry: usize, piece: u32) -> Result<Write<'a>> {
        let write = self.store.stage_held(entry, piece)?;
        let bytes = self.store.layout().piece(self.store.description(), entry, piece).bytes();
        self.count_written(entry, piece, bytes);
        Ok(Write::Step(write))
    }

    fn count_written(&mut self, entry: usize, piece: u32, bytes: u64) {
        let values = piece < self.chunks_of(entry);
        *(if values { &mut self.counters.values_written } else { &mut self.counters.state_written }) += bytes;
    }

    /// The part of a turn's staging chunk from which its chunk of a gradient goes to the log, and how many bytes are used.
    pub(crate) fn log_part(&self, turn: &Turn, dtype: Dtype) -> Result<(Shared, usize)> {
        let (used, bytes) = paged(self.elements(turn.entry, turn.index).len(), dtype);
        let part = turn.memory.part(0, bytes);
        let part = part.ok_or_else(|| Error::Invalid("a gradient is larger than a staging chunk".into()))?;
        Ok((part, used))
    }

    /// Begins to append a turn's chunk of a gradient to the log.
    pub(crate) fn append(&mut self, turn: &Turn, dtype: Dtype) -> Result<Write<'a>> {
        let (part, _) = self.log_part(turn, dtype)?;
        self.counters.log_written += part.len() as u64;
        Ok(Write::Step(self.store.append(turn.entry, turn.index, part)?))
    }

    /// The part of a staging chunk that is for a chunk of the spilled gradient, and how many of its bytes are used.
    pub(crate) fn spill_part(&self, entry: usize, chunk: u32, memory: &Shared) -> Result<(Shared, usize)> {
        let (used, paged) = self.store.spill_bytes(entry, chunk)?;
        let size = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        let part = memory.part(self.parts.gradient_at, size(paged));
        let part = part.ok_or_else(|| Error::Invalid("a gradient is larger than a staging chunk".into()))?;
        Ok((part, size(used)))
    }

    /// Begins to read a chunk of the spilled gradient into its part of a staging chunk.
    pub(crate) fn read_spill(&self, entry: usize, chunk: u32, memory: &Shared) -> Result<Read<'a>> {
        let (part, _) = self.spill_part(entry, chunk, memory)?;
        Ok(Read::Gradient(self.store.read_spill(entry, chunk, part)?))
    }

    /// Begins to write a chunk of the spilled gradient from its part of a staging chunk.
    pub(crate) fn write_spill(&mut self, entry: usize, chunk: u32, memory: &Shared) -> Result<Write<'a>> {
        let (part, _) = self.spill_part(entry, chunk, memory)?;
        let bytes = part.len() as u64;
        let write = self.store.write_spill(entry, chunk, part)?;
        self.counters.spill_written += bytes;
        Ok(Write::Gradient(write))
    }

    /// The tensors of a chunk's state, as they lie in the part of it that is for state: dtype, first byte, bytes.
    pub(crate) fn in_chunk(&self, entry: usize, chunk: u32) -> impl Iterator<Item = (Dtype, usize, usize)> + use<'a> {
        let description = self.store.description();
        description.in_chunk(entry, description.elements_of_chunk(entry, chunk))
    }
}

/// Part of memory that is staged.
pub(crate) fn inside(memory: &Shared, start: usize, nbytes: usize) -> Result<Shared> {
    let part = memory.part(start, nbytes);
    part.ok_or_else(|| Error::Invalid(format!("{nbytes} bytes from {start} on of {} staged ones", memory.len())))
}

pub(crate) fn bytes_of(dtype: Dtype) -> usize {
    usize::try_from(dtype.bytes()).unwrap_or(usize::MAX)
}

/// Bytes of so many elements, and the whole pages that they lie in.
pub(crate) fn paged(elements: usize, dtype: Dtype) -> (usize, usize) {
    let used = elements * bytes_of(dtype);
    (used, used.next_multiple_of(usize::try_from(PAGE_BYTES).unwrap_or(1)))
}

/// All bytes of a part of a staging chunk.
///
/// # Safety
/// Nothing is being read into it or written from it, and nothing else looks at it while the slice lives.
#[expect(clippy::mut_from_ref, reason = "a part is shared memory; the caller says that it is alone")]
pub(crate) unsafe fn bytes_mut(part: &Shared) -> &mut [u8] {
    // SAFETY: mapped and initialised while the part lives; the rest is the caller's.
    unsafe { std::slice::from_raw_parts_mut(part.as_ptr().as_ptr(), part.len()) }
}

/// `count` elements of `T` from byte `start` of a part of a staging chunk.
///
/// # Safety
/// As for [`bytes_mut`], of these elements alone; `start` is aligned for `T`, and any bits are a `T`.
#[expect(clippy::mut_from_ref, reason = "a part is shared memory; the caller says that it is alone")]
pub(crate) unsafe fn elements_mut<T>(part: &Shared, start: usize, count: usize) -> &mut [T] {
    assert!(start + count * size_of::<T>() <= part.len(), "elements past the end of a staging chunk");
    // SAFETY: inside the part.
    let first = unsafe { part.as_ptr().as_ptr().add(start) }.cast::<T>();
    // SAFETY: aligned, see above; the rest is the caller's.
    unsafe { std::slice::from_raw_parts_mut(first, count) }
}

/// The first `count` elements of a part of a staging chunk, of one of the types that the kernels know.
///
/// # Safety
/// As for [`bytes_mut`].
pub(crate) unsafe fn floats_mut(part: &Shared, dtype: Dtype, count: usize) -> FloatsMut<'_> {
    match dtype {
        // SAFETY: the caller's; a part begins on a page.
        Dtype::F32 => FloatsMut::F32(unsafe { elements_mut(part, 0, count) }),
        // SAFETY: as above.
        Dtype::Bf16 => FloatsMut::Bf16(unsafe { elements_mut(part, 0, count) }),
        // SAFETY: as above.
        _ => FloatsMut::F16(unsafe { elements_mut(part, 0, count) }),
    }
}

/// Zeros from byte `used` of a part to its end: what fills the last page.
///
/// # Safety
/// As for [`bytes_mut`], of these bytes alone.
pub(crate) unsafe fn clear_from(part: &Shared, used: usize) {
    // SAFETY: the caller's.
    unsafe { elements_mut::<u8>(part, used, part.len() - used) }.fill(0);
}
