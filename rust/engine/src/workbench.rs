//! Gives jobs the store and the parts of staging chunks. Starts reads and writes, and counts their bytes.

use std::{cell::RefCell, num::NonZeroUsize, ops::Range, sync::Arc};

use memascend_math::{Exec, FloatsMut};
use memascend_mem::Wait;
use memascend_store::{
    Buffer, Content, Description, Dtype, ExtentRead, PAGE_BYTES, Scratch, Shared, SpillRead, StepWrite, Store, Transfer,
};

pub(crate) use crate::gradient::floats;
use crate::{
    Counters, Error, Result,
    turn::{Mark, Turn},
};

/// The offsets of the parts of a staging chunk. The first part is for the state of a chunk, or for a piece of a state
/// tensor that is not cut into chunks. The second part is for the values of the chunk. The third part is for the
/// spilled gradient of the chunk; it is empty if no record can spill a gradient. A gradient for the log begins at the
/// start of the staging chunk instead ([`Workbench::log_part`]).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    values_at: usize,
    gradient_at: usize,
    bytes: usize,
}

impl Parts {
    pub(crate) fn new(description: &Description) -> Self {
        let (state, values) = description.staging_bytes();
        let chunk = u64::from(description.chunk_elements);
        let spills =
            description.records.iter().filter_map(|record| Some(record.spill?.bytes() * record.elements().min(chunk)));
        let gradient = spills.max().unwrap_or(0).next_multiple_of(PAGE_BYTES);
        Self {
            values_at: state as usize,
            gradient_at: (state + values) as usize,
            bytes: ((state + values + gradient) as usize).max(1),
        }
    }

    /// Returns the size of a staging chunk in bytes.
    pub(crate) fn bytes(self) -> usize {
        self.bytes
    }
}

/// Returns the size of one staging chunk in bytes, for an engine on a store with this description.
#[must_use]
pub fn chunk_bytes(description: &Description) -> u64 {
    Parts::new(description).bytes as u64
}

/// An extent, or a chunk of a spilled gradient, that is being read into staging memory.
pub(crate) enum Read<'a> {
    Values(ExtentRead<'a, Shared>),
    State(ExtentRead<'a, Shared>),
    Gradient(SpillRead<'a, Shared>),
}

/// An extent, or a chunk of a gradient, that is being written from staging memory or the RAM tier.
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

/// The store, memory and counters that a job works with.
pub(crate) struct Workbench<'a> {
    pub(crate) store: &'a Store,
    pub(crate) parts: Parts,
    pub(crate) exec: Exec,
    pub(crate) counters: Counters,
    /// Memory for state that is not cut into chunks, if any record has such state.
    pub(crate) others: Option<Scratch>,
    /// Memory for whole records, the smaller slot first.
    pub(crate) whole: Vec<Scratch>,
    /// The mark of the job that the pipeline is beginning, or has begun last.
    pub(crate) beginning: RefCell<Option<Arc<Mark>>>,
    extents: Extents,
}

/// Where the extents of a record are in memory.
enum Extents {
    /// In the staging chunk of the turn.
    Staged,
    /// In the RAM tier.
    RamTier,
    /// In memory that the caller gave for one chunk: the values, and the state if the chunk has any.
    Given(Shared, Option<Shared>),
}

impl<'a> Workbench<'a> {
    pub(crate) fn new(store: &'a Store, others: Option<Scratch>, whole: Vec<Scratch>) -> Result<Self> {
        let parts = Parts::new(store.description());
        let exec = Exec::new(NonZeroUsize::MIN)?;
        let (counters, beginning) = (Counters::default(), RefCell::default());
        Ok(Self { store, parts, exec, counters, others, whole, beginning, extents: Extents::Staged })
    }

    /// Creates a workbench for updates in place: [`Workbench::part`] returns extents of the RAM tier, not parts of a
    /// staging chunk.
    pub(crate) fn in_place(store: &'a Store) -> Result<Self> {
        Ok(Self { extents: Extents::RamTier, ..Self::new(store, None, Vec::new())? })
    }

    /// Creates a workbench for one chunk. The caller gives the memory that holds the values and the state of the chunk.
    pub(crate) fn on_chunk(store: &'a Store, values: Shared, state: Option<Shared>) -> Result<Self> {
        Ok(Self { extents: Extents::Given(values, state), ..Self::new(store, None, Vec::new())? })
    }

    /// Begins to stage a record. First waits for all reads of the slot that will be overwritten. If the job that begins
    /// now is cancelled, this wait ends with an error.
    pub(crate) fn begin(&self, record: usize, step: u64) -> Result<()> {
        self.waiting(|wait| self.store.begin(record, step, wait))
    }

    /// Begins to stage a record in RAM with the contents that it has in memory. Waits like [`Workbench::begin`].
    pub(crate) fn begin_snapshot(&self, record: usize) -> Result<()> {
        self.waiting(|wait| self.store.begin_snapshot(record, wait))
    }

    /// Begins to settle a record. Waits like [`Workbench::begin`].
    pub(crate) fn begin_settling(&self, record: usize) -> Result<()> {
        self.waiting(|wait| self.store.begin_settling(record, wait))
    }

    /// Calls `begin` with a [`Wait`]. The wait ends early if the job that the pipeline is beginning now is cancelled.
    fn waiting(&self, begin: impl FnOnce(Wait<'_>) -> memascend_store::Result<()>) -> Result<()> {
        let mut wanted = || self.beginning.borrow().as_ref().is_none_or(|mark| !mark.is_cancelled());
        Ok(begin(Wait { timeout: None, keep_waiting: Some(&mut wanted) })?)
    }

    pub(crate) fn chunks_of(&self, record: usize) -> u32 {
        self.store.layout().chunks_of(record)
    }

    /// Returns the extents of a chunk: first the extent of its values, then the extent of its state if the chunk has
    /// any state.
    pub(crate) fn extents_of_chunk(&self, record: usize, chunk: u32) -> impl Iterator<Item = u32> + use<> {
        std::iter::once(chunk).chain(self.state_extent(record, chunk))
    }

    /// Returns the extent of the state of a chunk. Returns `None` if the chunk has no state.
    pub(crate) fn state_extent(&self, record: usize, chunk: u32) -> Option<u32> {
        self.has_chunked_state(record).then_some(self.chunks_of(record) + chunk)
    }

    /// Returns the first extent of the state tensors that are not cut into chunks.
    pub(crate) fn first_other_extent(&self, record: usize) -> u32 {
        let chunks = self.chunks_of(record);
        if self.has_chunked_state(record) { 2 * chunks } else { chunks }
    }

    fn has_chunked_state(&self, record: usize) -> bool {
        self.chunks_of(record) > 0 && self.store.description().records[record].chunked().next().is_some()
    }

    /// Returns the range of elements of the record that a chunk holds.
    pub(crate) fn elements(&self, record: usize, chunk: u32) -> Range<usize> {
        let description = self.store.description();
        let start = chunk as usize * description.chunk_elements as usize;
        start..start + description.elements_of_chunk(record, chunk)
    }

    /// Returns the memory of an extent. With [`Extents::Staged`], this is a part of the staging chunk `memory`.
    /// Otherwise it is the memory that [`Extents`] describes.
    pub(crate) fn part(&self, record: usize, extent: u32, memory: &Shared) -> Result<Shared> {
        match &self.extents {
            Extents::Staged => {}
            Extents::RamTier => return self.ram_tier_extent(record, extent),
            Extents::Given(values, _) if extent < self.chunks_of(record) => return Ok(values.clone()),
            Extents::Given(_, state) => {
                let lacks = || Error::Invalid("report this bug: a chunk has no memory for state".into());
                return state.clone().ok_or_else(lacks);
            }
        }
        let place = self.store.layout().extent(self.store.description(), record, extent);
        let start = if matches!(place.content, Content::Values { .. }) { self.parts.values_at } else { 0 };
        let part = memory.part(start, place.bytes() as usize);
        part.ok_or_else(|| Error::Invalid("report this bug: an extent exceeds a staging chunk".into()))
    }

    /// Starts to read an extent into its part of a staging chunk.
    pub(crate) fn read(&self, record: usize, extent: u32, memory: &Shared) -> Result<Read<'a>> {
        self.read_into(record, extent, self.part(record, extent, memory)?)
    }

    /// Starts to read an extent into `part`, which must have the size of the extent.
    pub(crate) fn read_into(&self, record: usize, extent: u32, part: Shared) -> Result<Read<'a>> {
        let read = self.store.read(record, extent, part)?;
        Ok(if extent < self.chunks_of(record) { Read::Values(read) } else { Read::State(read) })
    }

    /// Copies an extent from the RAM tier to `part`, which must have the size of the extent.
    pub(crate) fn take_ram_tier(&self, record: usize, extent: u32, part: &Shared) -> Result<()> {
        let ram_tier = self.ram_tier_extent(record, extent)?;
        // SAFETY: the caller's job is the committed update of the record. Until this update is applied, only this job
        // uses the record's memory in the RAM tier (`InMemoryUpdate::part`).
        let from = unsafe { bytes_mut(&ram_tier) };
        // SAFETY: `part` belongs to the caller's turn, and is disjoint from the RAM tier.
        unsafe { bytes_mut(part) }.copy_from_slice(from);
        Ok(())
    }

    /// Copies `part` to an extent in the RAM tier. The extent must have the size of `part`.
    pub(crate) fn put_in_ram(&self, record: usize, extent: u32, part: &Shared) -> Result<()> {
        let ram_tier = self.ram_tier_extent(record, extent)?;
        // SAFETY: the caller's job is the committed update of the record. Until this update is applied, only this job
        // uses the record's memory in the RAM tier (`InMemoryUpdate::part`).
        let into = unsafe { bytes_mut(&ram_tier) };
        // SAFETY: `part` belongs to the caller's turn, and is disjoint from the RAM tier.
        into.copy_from_slice(unsafe { bytes_mut(part) });
        Ok(())
    }

    fn ram_tier_extent(&self, record: usize, extent: u32) -> Result<Shared> {
        let extent = self.store.ram_tier_extent(record, extent);
        extent.ok_or_else(|| Error::Invalid("report this bug: a record is not in RAM".into()))
    }

    /// Waits for a read, verifies the data, and counts its bytes.
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

    /// Starts to stage an extent from its part of a staging chunk.
    pub(crate) fn stage(&mut self, record: usize, extent: u32, memory: &Shared) -> Result<Write<'a>> {
        self.stage_from(record, extent, self.part(record, extent, memory)?)
    }

    /// Starts to stage the values and the state of a chunk from their parts of a staging chunk.
    pub(crate) fn stage_chunk(&mut self, record: usize, chunk: u32, memory: &Shared) -> Result<Vec<Write<'a>>> {
        let state = self.state_extent(record, chunk).map(|extent| self.stage(record, extent, memory));
        let values = self.stage(record, chunk, memory);
        // If one of the two writes fails to start, `collect` drops the other write. The drop waits until this other
        // write has ended.
        state.into_iter().chain([values]).collect()
    }

    /// Starts to stage an extent from `part`, which must have the size of the extent.
    pub(crate) fn stage_from(&mut self, record: usize, extent: u32, part: Shared) -> Result<Write<'a>> {
        let bytes = part.len() as u64;
        let write = self.store.stage(record, extent, part)?;
        self.count_written(record, extent, bytes);
        Ok(Write::Step(write))
    }

    /// Starts to stage an extent from the RAM tier.
    pub(crate) fn stage_in_ram(&mut self, record: usize, extent: u32) -> Result<Write<'a>> {
        let write = self.store.stage_in_ram(record, extent)?;
        let bytes = self.store.layout().extent(self.store.description(), record, extent).bytes();
        self.count_written(record, extent, bytes);
        Ok(Write::Step(write))
    }

    fn count_written(&mut self, record: usize, extent: u32, bytes: u64) {
        let values = extent < self.chunks_of(record);
        *(if values { &mut self.counters.values_written } else { &mut self.counters.state_written }) += bytes;
    }

    /// Returns the part of the turn's staging chunk that is for a logged gradient. Also returns how many bytes of this
    /// part the gradient uses.
    pub(crate) fn log_part(&self, turn: &Turn, dtype: Dtype) -> Result<(Shared, usize)> {
        let (used, bytes) = paged(self.elements(turn.record, turn.index).len(), dtype);
        let part = turn.memory.part(0, bytes);
        let part = part.ok_or_else(|| Error::Invalid("report this bug: a gradient exceeds its chunk".into()))?;
        Ok((part, used))
    }

    /// Starts to append the turn's chunk of a gradient to the log.
    pub(crate) fn append(&mut self, turn: &Turn, dtype: Dtype) -> Result<Write<'a>> {
        let (part, _) = self.log_part(turn, dtype)?;
        self.counters.log_written += part.len() as u64;
        Ok(Write::Step(self.store.append(turn.record, turn.index, part)?))
    }

    /// Returns the part of the staging chunk `memory` that is for a spilled gradient. Also returns how many bytes of
    /// this part the gradient uses.
    pub(crate) fn spill_part(&self, record: usize, chunk: u32, memory: &Shared) -> Result<(Shared, usize)> {
        let (used, paged) = self.store.spill_bytes(record, chunk)?;
        let part = memory.part(self.parts.gradient_at, paged as usize);
        let part = part.ok_or_else(|| Error::Invalid("report this bug: a gradient exceeds its chunk".into()))?;
        Ok((part, used as usize))
    }

    /// Starts to read a chunk of the spilled gradient into its part of a staging chunk.
    pub(crate) fn read_spill(&self, record: usize, chunk: u32, memory: &Shared) -> Result<Read<'a>> {
        let (part, _) = self.spill_part(record, chunk, memory)?;
        Ok(Read::Gradient(self.store.read_spill(record, chunk, part)?))
    }

    /// Starts to write a chunk of the spilled gradient from its part of a staging chunk.
    pub(crate) fn write_spill(&mut self, record: usize, chunk: u32, memory: &Shared) -> Result<Write<'a>> {
        let (part, _) = self.spill_part(record, chunk, memory)?;
        let bytes = part.len() as u64;
        let write = self.store.write_spill(record, chunk, part)?;
        self.counters.spill_written += bytes;
        Ok(Write::Gradient(write))
    }

    /// Returns the dtype, the offset in bytes and the size in bytes of each state tensor in a chunk. The tensors come
    /// in the order in which the extent of the state stores them.
    pub(crate) fn in_chunk(&self, record: usize, chunk: u32) -> impl Iterator<Item = (Dtype, usize, usize)> + use<'a> {
        let description = self.store.description();
        description.in_chunk(record, description.elements_of_chunk(record, chunk))
    }
}

/// Returns `nbytes` bytes of `memory`, beginning with byte `start`. Returns an error if the memory ends before these
/// bytes end.
pub(crate) fn inside(memory: &Shared, start: usize, nbytes: usize) -> Result<Shared> {
    let part = memory.part(start, nbytes);
    part.ok_or_else(|| Error::Invalid(format!("report this bug: {nbytes} bytes at {start} exceed {}", memory.len())))
}

pub(crate) fn bytes_of(dtype: Dtype) -> usize {
    dtype.bytes() as usize
}

/// Returns the size in bytes of `elements` elements, and this size rounded up to whole pages.
pub(crate) fn paged(elements: usize, dtype: Dtype) -> (usize, usize) {
    let used = elements * bytes_of(dtype);
    (used, used.next_multiple_of(PAGE_BYTES as usize))
}

/// Returns all bytes of `part`, such as a part of a staging chunk.
///
/// # Safety
/// No read into the part and no write from it may be in flight, and nothing else may access the part while the slice
/// lives.
#[expect(clippy::mut_from_ref, reason = "a part is shared memory; the caller guarantees exclusive access")]
pub(crate) unsafe fn bytes_mut(part: &Shared) -> &mut [u8] {
    // SAFETY: a part is mapped and initialised while it lives; the caller guarantees exclusive access.
    unsafe { std::slice::from_raw_parts_mut(part.as_ptr().as_ptr(), part.len()) }
}

/// Returns `count` elements of type `T` of a part of a staging chunk, beginning with byte `start`.
///
/// # Safety
/// The conditions of [`bytes_mut`] must hold for these elements. The address of byte `start` must be aligned for `T`,
/// and every bit pattern must be a valid `T`.
#[expect(clippy::mut_from_ref, reason = "a part is shared memory; the caller guarantees exclusive access")]
pub(crate) unsafe fn elements_mut<T>(part: &Shared, start: usize, count: usize) -> &mut [T] {
    assert!(start + count * size_of::<T>() <= part.len(), "elements past the end of a staging chunk");
    // SAFETY: the assertion above keeps the elements inside the part.
    let first = unsafe { part.as_ptr().as_ptr().add(start) }.cast::<T>();
    // SAFETY: the caller guarantees alignment, valid bit patterns and exclusive access.
    unsafe { std::slice::from_raw_parts_mut(first, count) }
}

/// Returns the first `count` elements of a part of a staging chunk, as float32, bfloat16 or float16.
///
/// # Safety
/// The conditions of [`bytes_mut`] must hold, and `part` must begin on a page.
pub(crate) unsafe fn floats_mut(part: &Shared, dtype: Dtype, count: usize) -> FloatsMut<'_> {
    match dtype {
        // SAFETY: the caller guarantees exclusive access, and that `part` begins on a page. A page is aligned for any
        // of the types.
        Dtype::F32 => FloatsMut::F32(unsafe { elements_mut(part, 0, count) }),
        // SAFETY: the caller guarantees exclusive access, and that `part` begins on a page.
        Dtype::Bf16 => FloatsMut::Bf16(unsafe { elements_mut(part, 0, count) }),
        // SAFETY: the caller guarantees exclusive access, and that `part` begins on a page.
        _ => FloatsMut::F16(unsafe { elements_mut(part, 0, count) }),
    }
}

/// Fills `part` with zeros, from byte `used` to its end.
///
/// # Safety
/// The conditions of [`bytes_mut`] must hold for these bytes.
pub(crate) unsafe fn clear_from(part: &Shared, used: usize) {
    // SAFETY: the caller guarantees exclusive access to these bytes.
    unsafe { elements_mut::<u8>(part, used, part.len() - used) }.fill(0);
}
