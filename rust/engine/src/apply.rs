//! Calls a user's function on the tensors of one chunk, or of a whole record. The tensors are in the engine's memory.

use std::{cell::RefCell, sync::Arc};

use memascend_mem::Wait;
use memascend_store::{Content, Description, PAGE_BYTES, Scratch, Shared, Store, WHOLE_EXTENT_BYTES};

use crate::{
    Cause, Counters, Error, Result,
    job::{Call, Work},
    live::Live,
    ram_tier::Kept,
    spill::required,
    turn::Turn,
    whole::{self, Plan},
    workbench::{Read, Workbench, Write, inside},
};

/// The number of memory slots for state tensors that are not cut into chunks. There are two slots, because a function
/// computes on one record while the pipeline reads the next record.
const OTHERS_AT_ONCE: usize = 2;

/// The arguments of a [`Function`]. The function may read and write this memory during the call. Each piece of memory
/// is exactly as long as its tensor.
pub struct Chunk {
    /// The values of `count` elements, beginning with element `start`, in the order in which the store holds them.
    pub values: Shared,
    /// The spilled gradient of the elements in `values`. `None` unless [`Application::spilled`] is set.
    pub gradient: Option<Shared>,
    /// The state tensors, in the order of the store's description. With [`FunctionInput::Wide`], these are the widened
    /// float32 tensors instead. A tensor of the record's shape holds the elements that `values` holds. A tensor with
    /// one item for several elements holds the items for the elements in `values`. A tensor that is not cut into chunks
    /// is passed whole, and every call gets the same memory for it.
    pub state: Vec<Shared>,
    /// The index, in the record, of the first element in `values`.
    pub start: usize,
    /// The number of elements in `values`.
    pub count: usize,
    /// True in the last call for the record.
    pub last: bool,
}

/// A function of the caller that computes one chunk, or a whole record, in place. The engine calls such functions on a
/// thread of the engine, one at a time. The function must not wait for the engine. A function that returns while it
/// still holds a [`Shared`] of its [`Chunk`] must return an error. The engine leases this memory again only after the
/// last such [`Shared`] is dropped.
pub type Function = dyn Fn(Chunk) -> std::result::Result<(), Cause> + Send + Sync;

/// How the engine passes a record to a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FunctionInput {
    /// The engine calls the function once for each chunk, and once for a record without elements.
    InChunks,
    /// The engine calls the function once, with the whole record.
    Whole,
    /// The engine calls the function once, with the whole record, and widens the record's reduced state to float32. The
    /// function gets one or two moments, and master weights if the values have 16 bits.
    Wide,
}

/// A function, and how the engine applies it to a record.
pub struct Application {
    /// The function that the engine calls.
    pub function: Box<Function>,
    /// Bytes of the tensors, such as a gradient, that `function` keeps in memory until its call has ended.
    pub nbytes: usize,
    /// The number of this update, counted from 1 over all updates of the record.
    pub step: u64,
    /// Whether the function gets the spilled gradient.
    pub spilled: bool,
    /// How the engine passes the record to the function.
    pub input: FunctionInput,
    /// Set this to let the engine call the function after the commit, on the record in memory. The engine does so only
    /// if the record is in RAM and the durability of the store is "none". The function must then not fail, because an
    /// error would end the run. In every other case, the engine calls the function before the commit and stages the
    /// results.
    pub after_commit: bool,
}

/// Allocates the memory for state tensors that are not cut into chunks. Each slot is large enough for any record.
/// Returns `None` if all state tensors are cut into chunks.
pub(crate) fn others(description: &Description) -> Result<Option<Scratch>> {
    let bytes = largest_others(description);
    let room = (bytes > 0).then(|| Scratch::new(bytes, OTHERS_AT_ONCE, "other state"));
    Ok(room.transpose()?)
}

/// Allocates memory of `whole_bytes` for one whole record, and memory of `whole_next_bytes`, but at most `whole_bytes`,
/// for the next whole record. The smaller memory comes first in the result. A size of 0 allocates nothing.
pub(crate) fn wholes(whole_bytes: usize, whole_next_bytes: usize) -> Result<Vec<Scratch>> {
    let sizes = [whole_next_bytes.min(whole_bytes), whole_bytes].into_iter().filter(|&bytes| bytes > 0);
    sizes.map(|bytes| Ok(Scratch::new(bytes, 1, "whole parameters")?)).collect()
}

/// Leases a slot of `room`. Returns `None` if no slot is free.
fn free_slot(room: &Scratch) -> Result<Option<Shared>> {
    match room.lease(Wait::never()) {
        Ok(lease) => Ok(Some(Shared::new(lease))),
        Err(memascend_mem::Error::TimedOut { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns how many bytes an engine allocates for state tensors that are not cut into chunks, for a store with this
/// description.
#[must_use]
pub fn other_bytes(description: &Description) -> u64 {
    (largest_others(description) * OTHERS_AT_ONCE) as u64
}

fn largest_others(description: &Description) -> usize {
    let of = |record: usize| other_tensors(description, record).last().map_or(0, |(at, nbytes)| paged(at + nbytes));
    (0..description.records.len()).map(of).max().unwrap_or(0)
}

/// Returns the offset and the size in bytes of each state tensor that is not cut into chunks. These tensors share one
/// memory slot, and each offset counts from the start of this slot.
fn other_tensors(description: &Description, record: usize) -> impl Iterator<Item = (usize, usize)> {
    description.records[record].whole().scan(0, |at, tensor| {
        let (start, nbytes) = (*at, tensor.nbytes() as usize);
        *at = paged(start + nbytes);
        Some((start, nbytes))
    })
}

fn paged(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE_BYTES as usize)
}

impl Application {
    fn is_whole(&self) -> bool {
        self.input != FunctionInput::InChunks
    }

    fn is_wide(&self) -> bool {
        self.input == FunctionInput::Wide
    }
}

/// A job that calls the function of an [`Application`] on its record.
pub(crate) struct Apply {
    asked: Arc<Application>,
    /// The kept gradient of the record. `None` if the record is not in RAM, or if the function gets no gradient.
    kept: Option<Arc<Kept>>,
    /// Bytes of memory that the whole record takes.
    whole_bytes: usize,
    /// The record's values in the caller's memory. With `None`, the job reads the values from storage, or copies the
    /// values from the RAM tier.
    live: Option<Live>,
    /// True if the job copies the record from the RAM tier to staging memory, and copies the results back. Otherwise
    /// the job reads the record from storage and stages the results.
    in_memory: bool,
    /// Memory for state tensors that are not cut into chunks. `claim` leases this memory.
    others: RefCell<Option<Shared>>,
    /// Memory for the whole record, if the function gets the whole record. `claim` leases this memory.
    all: RefCell<Option<Shared>>,
}

impl Apply {
    pub(crate) fn new(store: &Store, record: usize, asked: Application, whole_bytes: usize) -> Result<Self> {
        let described = &store.description().records[record];
        if let Some(tensor) =
            described.state.iter().find(|tensor| asked.input == FunctionInput::Whole && tensor.grain > 1)
        {
            let (name, of, grain) = (&described.name, &tensor.name, tensor.grain);
            return Err(Error::Invalid(format!(
                "the state tensor {of:?} of {name:?} has one item for {grain} elements, so the engine cannot pass the \
                 whole record unchanged: apply the function in chunks (whole=False), or describe the record with a \
                 format that has master weights"
            )));
        }
        let needed = Plan::new(store, record, asked.spilled, asked.is_wide())?.bytes;
        if asked.is_whole() && needed > whole_bytes {
            let name = &store.description().records[record].name;
            return Err(Error::Invalid(format!(
                "the whole of {name:?} takes {needed} bytes, and the engine has {whole_bytes} for whole records; start \
                 the \
                 engine with whole={needed}"
            )));
        }
        let asked = Arc::new(asked);
        let (others, all) = (RefCell::default(), RefCell::default());
        Ok(Self { asked, kept: None, whole_bytes: needed, live: None, in_memory: false, others, all })
    }

    /// Sets `kept`. If `kept` is `Some`, the job takes the gradient of the record from `kept`.
    pub(crate) fn by_kept(self, kept: Option<Arc<Kept>>) -> Self {
        Self { kept, ..self }
    }

    /// Sets `live`, from which the job copies the values. With `None`, the job reads the values from storage.
    pub(crate) fn on_live(self, live: Option<Live>) -> Self {
        Self { live, ..self }
    }

    /// Makes the job change the record in the RAM tier. The job must run after the commit of its step.
    pub(crate) fn in_memory(self) -> Self {
        Self { in_memory: true, ..self }
    }
}

impl Work for Apply {
    fn nbytes(&self) -> usize {
        self.asked.nbytes
    }

    fn is_ours(&self) -> bool {
        false
    }

    /// Leases the memory for state tensors that are not cut into chunks, and the memory for the whole record. Returns
    /// `false` if either lease finds no free slot.
    fn claim(&self, bench: &Workbench<'_>, record: usize) -> Result<bool> {
        let description = bench.store.description();
        let mut others = self.others.borrow_mut();
        if let (None, Some(room), Some(_)) = (&*others, &bench.others, description.records[record].whole().next()) {
            *others = free_slot(room)?;
            if others.is_none() {
                return Ok(false);
            }
        }
        let mut all = self.all.borrow_mut();
        if !self.asked.is_whole() || self.whole_bytes == 0 || all.is_some() {
            return Ok(true);
        }
        let mut fitting = bench.whole.iter().filter(|room| room.each >= self.whole_bytes);
        *all = fitting.find_map(|room| free_slot(room).transpose()).transpose()?;
        Ok(all.is_some())
    }

    fn begin(&self, bench: &Workbench<'_>, record: usize) -> Result<()> {
        if self.asked.spilled && self.kept.is_none() {
            required(bench.store, record)?;
        }
        if self.in_memory { Ok(()) } else { bench.begin(record, self.asked.step) }
    }

    /// If the function gets the record in chunks, the job takes one turn for each chunk, and at least one turn. If the
    /// function gets the whole record, the job takes one turn to read each chunk, one turn for the call, and one turn
    /// to write each chunk.
    fn turns(&self, bench: &Workbench<'_>, record: usize) -> u32 {
        let chunks = bench.chunks_of(record);
        if self.asked.is_whole() { 2 * chunks + 1 } else { chunks.max(1) }
    }

    fn reads<'a>(&self, bench: &Workbench<'a>, turn: &Turn) -> Result<Vec<Read<'a>>> {
        let &Turn { record, index, ref memory } = turn;
        let mut reads = Vec::new();
        let mut extents = if index == 0 { self.other_extents(bench, record)? } else { Vec::new() };
        if index < bench.chunks_of(record) {
            for extent in bench.extents_of_chunk(record, index).skip(usize::from(self.live.is_some())) {
                extents.push((extent, bench.part(record, extent, memory)?));
            }
        }
        for (extent, part) in extents {
            if self.in_memory {
                bench.take_ram_tier(record, extent, &part)?;
            } else {
                reads.push(bench.read_into(record, extent, part)?);
            }
        }
        if index < bench.chunks_of(record) && self.asked.spilled && self.kept.is_none() {
            reads.push(bench.read_spill(record, index, memory)?);
        }
        Ok(reads)
    }

    fn compute(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let &Turn { record, index, ref memory } = turn;
        let chunks = bench.chunks_of(record);
        if let Some(kept) = self.kept.as_ref().filter(|_| index < chunks) {
            kept.lay(bench, turn)?;
        }
        if let Some(live) = self.live.as_ref().filter(|_| index < chunks) {
            live.take(bench, turn)?;
        }
        if !self.asked.is_whole() {
            return self.calling(bench, record, self.of_chunk(bench, turn)?)();
        }
        // A record without elements needs no memory, and its call happens here. For all other records, `called_at`
        // returns the turn of the call, and the thread of `Caller` runs the call.
        if index == chunks {
            return self.calling(bench, record, self.in_one_piece(bench, record, memory)?)();
        }
        let all = self.all.borrow();
        let all = all.as_ref().unwrap_or(memory);
        let plan = Plan::new(bench.store, record, self.asked.spilled, self.asked.is_wide())?;
        if index < chunks {
            whole::gathered(bench, (record, index), memory, &plan, all)
        } else {
            whole::scattered(bench, (record, index - chunks - 1), memory, &plan, all)
        }
    }

    /// Returns the turn of the function's call on a whole record. This turn comes after the turns that read the record,
    /// and before the turns that write the record. Returns `None` if the function gets the record in chunks, or if the
    /// record has no elements.
    fn called_at(&self, bench: &Workbench<'_>, record: usize) -> Option<u32> {
        let chunks = bench.chunks_of(record);
        (self.asked.is_whole() && chunks > 0).then_some(chunks)
    }

    fn call(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<Call> {
        Ok(self.calling(bench, turn.record, self.in_one_piece(bench, turn.record, &turn.memory)?))
    }

    fn writes<'a>(&self, bench: &mut Workbench<'a>, turn: &Turn) -> Result<Vec<Write<'a>>> {
        let &Turn { record, index, ref memory } = turn;
        let chunks = bench.chunks_of(record);
        let mut extents = Vec::new();
        let chunk = if self.asked.is_whole() { index.checked_sub(chunks + 1) } else { Some(index) };
        if let Some(chunk) = chunk.filter(|&chunk| chunk < chunks) {
            for extent in bench.extents_of_chunk(record, chunk) {
                extents.push((extent, bench.part(record, extent, memory)?));
            }
        }
        if index + 1 == self.turns(bench, record) {
            extents.extend(self.other_extents(bench, record)?);
        }
        let mut writes = Vec::new();
        for (extent, part) in extents {
            if self.in_memory {
                bench.put_in_ram(record, extent, &part)?;
            } else {
                writes.push(bench.stage_from(record, extent, part)?);
            }
        }
        Ok(writes)
    }

    fn counted<'a>(&self, counters: &'a mut Counters) -> Option<&'a mut u64> {
        Some(&mut counters.applied)
    }
}

impl Apply {
    fn calling(&self, bench: &Workbench<'_>, record: usize, chunk: Chunk) -> Call {
        let (asked, name) = (Arc::clone(&self.asked), bench.store.description().records[record].name.clone());
        Box::new(move || (asked.function)(chunk).map_err(|cause| Error::Function { name, cause }))
    }

    fn in_one_piece(&self, bench: &Workbench<'_>, record: usize, memory: &Shared) -> Result<Chunk> {
        let plan = Plan::new(bench.store, record, self.asked.spilled, self.asked.is_wide())?;
        let (values, state, gradient) = plan.parts(self.all.borrow().as_ref().unwrap_or(memory))?;
        let state = if self.asked.is_wide() { state } else { self.state(bench, record, state)? };
        let count = bench.store.description().records[record].elements() as usize;
        Ok(Chunk { values, gradient, state, start: 0, count, last: true })
    }

    fn of_chunk(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<Chunk> {
        let &Turn { record, index: chunk, ref memory } = turn;
        let last = chunk + 1 == self.turns(bench, record);
        let elements = bench.elements(record, chunk);
        let (start, count) = (elements.start, elements.len());
        if count == 0 {
            let nothing = inside(memory, 0, 0)?;
            let chunked = bench.store.description().records[record].chunked().map(|_| nothing.clone()).collect();
            let gradient = self.asked.spilled.then(|| nothing.clone());
            let state = self.state(bench, record, chunked)?;
            return Ok(Chunk { values: nothing, gradient, state, start, count, last });
        }
        let element = bench.store.description().records[record].dtype.bytes();
        let used = count * element as usize;
        let values = inside(&bench.part(record, chunk, memory)?, 0, used)?;
        let gradient = if self.asked.spilled {
            let (part, used) = bench.spill_part(record, chunk, memory)?;
            Some(inside(&part, 0, used)?)
        } else {
            None
        };
        let chunked = bench.in_chunk(record, chunk).map(|(_, at, nbytes)| inside(memory, at, nbytes));
        let state = self.state(bench, record, chunked.collect::<Result<_>>()?)?;
        Ok(Chunk { values, gradient, state, start, count, last })
    }

    /// Returns all state tensors, in the order of the description. `chunked` has the tensors that are cut into chunks.
    /// `self.others` has the memory of all other state tensors.
    fn state(&self, bench: &Workbench<'_>, record: usize, chunked: Vec<Shared>) -> Result<Vec<Shared>> {
        let description = bench.store.description();
        let described = &description.records[record];
        let others = self.others.borrow();
        let (mut chunked, mut other) = (chunked.into_iter(), other_tensors(description, record));
        let part = |tensor: &memascend_store::StateTensor| {
            let found = if tensor.grain > 0 {
                chunked.next()
            } else {
                others.as_ref().zip(other.next()).and_then(|(memory, (at, nbytes))| memory.part(at, nbytes))
            };
            found.ok_or_else(|| Error::Invalid("report this bug: a state tensor has no memory".into()))
        };
        described.state.iter().map(part).collect()
    }

    /// Returns the extents of the state tensors that are not cut into chunks, each extent with its memory.
    fn other_extents(&self, bench: &Workbench<'_>, record: usize) -> Result<Vec<(u32, Shared)>> {
        let (layout, description) = (bench.store.layout(), bench.store.description());
        let others = self.others.borrow();
        let Some(memory) = &*others else { return Ok(Vec::new()) };
        let mut extents = Vec::new();
        for index in bench.first_other_extent(record)..layout.extents_of(record) {
            let extent = layout.extent(description, record, index);
            let Content::Whole { tensor, part } = extent.content else { continue };
            let start = other_tensors(description, record).nth(tensor as usize).map_or(0, |(at, _)| at);
            let before = (u64::from(part) * WHOLE_EXTENT_BYTES) as usize;
            let bytes = extent.bytes() as usize;
            extents.push((index, inside(memory, start + before, bytes)?));
        }
        Ok(extents)
    }
}
