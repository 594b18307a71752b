//! Runs a caller's function on the tensors of a chunk, or of a whole entry, in staging memory.

use std::{cell::RefCell, sync::Arc};

use memascend_mem::Wait;
use memascend_store::{Content, Description, PAGE_BYTES, Scratch, Shared, Store, WHOLE_PIECE_BYTES};

use crate::{
    Cause, Counters, Error, Result,
    held::Kept,
    job::{Call, Work},
    live::Live,
    spill::required,
    turn::Turn,
    whole::{self, Plan},
    workbench::{Read, Workbench, Write, inside},
};

/// Entries whose tensors of other shapes are held at once: one is computed while the next one's are read.
const OTHERS_AT_ONCE: usize = 2;

/// What a function gets: memory that is its own during the call, each part exactly as long as its tensor.
pub struct Chunk {
    /// The values, `count` elements from `start` on in the order in which they are stored.
    pub values: Shared,
    /// The spilled gradient, where that was asked for; alike.
    pub gradient: Option<Shared>,
    /// The state as it is described, unless it is widened: alike where it has the entry's shape; the items of these elements where it has one for
    /// several; else all of it, the same memory in each call.
    pub state: Vec<Shared>,
    /// The first element.
    pub start: usize,
    /// How many elements.
    pub count: usize,
    /// Whether it is the entry's last call.
    pub last: bool,
}

/// Arithmetic that is not ours.
pub trait Function: Send + Sync {
    /// Computes one chunk in place, on a thread of the engine's; no two functions of an engine at once. It must not wait for
    /// the engine. Memory of the chunk that is held beyond the call is not written again, but it is missing to the engine:
    /// the function has to report it.
    fn call(&self, chunk: Chunk) -> std::result::Result<(), Cause>;
}

/// How a function gets an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Given {
    /// A call for each chunk.
    InChunks,
    /// One call, with all of it.
    Whole,
    /// The same, with state in a format of its own in float32: the master of 16-bit values, one moment or two.
    Wide,
}

/// What is to be applied.
pub struct Application {
    /// What computes.
    pub function: Box<dyn Function>,
    /// Bytes that it holds for the caller while it waits: those of a gradient.
    pub nbytes: usize,
    /// The entry's count of updates, this one included.
    pub step: u64,
    /// Whether it gets the spilled gradient.
    pub spilled: bool,
    /// How it gets the entry.
    pub given: Given,
    /// Whether it is called after the commit, on the entry in memory, where the entry is held and nothing is to be durable
    /// before the end. So it must not fail, which would end the run. Otherwise it is called before the commit, and what it
    /// writes is staged.
    pub after_commit: bool,
}

/// Room for the tensors of other shapes than their entry's, of the entry that has the most of them.
pub(crate) fn others(description: &Description) -> Result<Option<Scratch>> {
    let bytes = largest_others(description);
    let room = (bytes > 0).then(|| Scratch::new(bytes, OTHERS_AT_ONCE, "other state"));
    Ok(room.transpose()?)
}

/// Room for one entry in one piece, and for the next one, which may have to be a smaller one; the smaller room first.
pub(crate) fn wholes(whole_bytes: usize, whole_next_bytes: usize) -> Result<Vec<Scratch>> {
    let sizes = [whole_next_bytes.min(whole_bytes), whole_bytes].into_iter().filter(|&bytes| bytes > 0);
    sizes.map(|bytes| Ok(Scratch::new(bytes, 1, "whole parameters")?)).collect()
}

/// A piece of a room, if one is free.
fn free_piece(room: &Scratch) -> Result<Option<Shared>> {
    match room.lease(Wait::never()) {
        Ok(lease) => Ok(Some(Shared::new(lease))),
        Err(memascend_mem::Error::TimedOut { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Bytes that an engine holds for state of other shapes than its entries', on a store of this description.
#[must_use]
pub fn other_bytes(description: &Description) -> u64 {
    (largest_others(description) * OTHERS_AT_ONCE) as u64
}

fn largest_others(description: &Description) -> usize {
    let of = |entry: usize| other_tensors(description, entry).last().map_or(0, |(at, nbytes)| paged(at + nbytes));
    (0..description.entries.len()).map(of).max().unwrap_or(0)
}

/// Where each tensor of another shape lies in their memory, and its bytes.
fn other_tensors(description: &Description, entry: usize) -> impl Iterator<Item = (usize, usize)> {
    description.entries[entry].whole().scan(0, |at, tensor| {
        let (start, nbytes) = (*at, usize::try_from(tensor.nbytes()).unwrap_or(usize::MAX));
        *at = paged(start + nbytes);
        Some((start, nbytes))
    })
}

fn paged(bytes: usize) -> usize {
    bytes.next_multiple_of(usize::try_from(PAGE_BYTES).unwrap_or(1))
}

impl Application {
    fn is_whole(&self) -> bool {
        self.given != Given::InChunks
    }

    fn is_wide(&self) -> bool {
        self.given == Given::Wide
    }
}

/// An [`Application`] that fits its entry.
pub(crate) struct Apply {
    asked: Arc<Application>,
    /// The gradient that is kept in memory instead of spilled, where the entry is held.
    kept: Option<Arc<Kept>>,
    /// Bytes of the entry in one piece.
    whole_bytes: usize,
    /// The values that it starts from, where the caller has them and they lie nowhere else in memory.
    live: Option<Live>,
    /// Whether it is applied to the entry in memory, which is neither read nor staged.
    in_memory: bool,
    /// The tensors of other shapes, once it has begun.
    others: RefCell<Option<Shared>>,
    /// All of the entry, once it has begun, where it is wanted whole.
    all: RefCell<Option<Shared>>,
}

impl Apply {
    pub(crate) fn new(store: &Store, entry: usize, asked: Application, whole_bytes: usize) -> Result<Self> {
        let described = &store.description().entries[entry];
        if let Some(tensor) = described.state.iter().find(|tensor| asked.given == Given::Whole && tensor.grain > 1) {
            let (name, of, grain) = (&described.name, &tensor.name, tensor.grain);
            return Err(Error::Invalid(format!(
                "{of:?} of {name:?} has an item for each {grain} elements, not for each: it is not given in one piece"
            )));
        }
        let needed = Plan::new(store, entry, asked.spilled, asked.is_wide())?.bytes;
        if asked.is_whole() && needed > whole_bytes {
            let name = &store.description().entries[entry].name;
            return Err(Error::Invalid(format!(
                "{name:?} in one piece takes {needed} bytes, and the engine has {whole_bytes} for that; start it with whole={needed}"
            )));
        }
        let asked = Arc::new(asked);
        let (others, all) = (RefCell::default(), RefCell::default());
        Ok(Self { asked, kept: None, whole_bytes: needed, live: None, in_memory: false, others, all })
    }

    /// The same, with a gradient that is kept in memory instead of spilled.
    pub(crate) fn by_kept(self, kept: Option<Arc<Kept>>) -> Self {
        Self { kept, ..self }
    }

    /// The same, on values that the caller has.
    pub(crate) fn on_live(self, live: Option<Live>) -> Self {
        Self { live, ..self }
    }

    /// The same, on an entry that is held, once its step is committed.
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

    /// Takes the memory that it needs beside staging chunks; `false` if that is not free.
    fn claim(&self, bench: &Workbench<'_>, entry: usize) -> Result<bool> {
        let description = bench.store.description();
        let mut others = self.others.borrow_mut();
        if let (None, Some(room), Some(_)) = (&*others, &bench.others, description.entries[entry].whole().next()) {
            *others = free_piece(room)?;
            if others.is_none() {
                return Ok(false);
            }
        }
        let mut all = self.all.borrow_mut();
        if !self.asked.is_whole() || self.whole_bytes == 0 || all.is_some() {
            return Ok(true);
        }
        let mut fitting = bench.whole.iter().filter(|room| room.each >= self.whole_bytes);
        *all = fitting.find_map(|room| free_piece(room).transpose()).transpose()?;
        Ok(all.is_some())
    }

    fn begin(&self, bench: &Workbench<'_>, entry: usize) -> Result<()> {
        if self.asked.spilled && self.kept.is_none() {
            required(bench.store, entry)?;
        }
        if self.in_memory { Ok(()) } else { bench.begin(entry, self.asked.step) }
    }

    /// A call for each chunk, or one without elements. Whole: reads, the call, writes.
    fn turns(&self, bench: &Workbench<'_>, entry: usize) -> u32 {
        let chunks = bench.chunks_of(entry);
        if self.asked.is_whole() { 2 * chunks + 1 } else { chunks.max(1) }
    }

    fn reads<'a>(&self, bench: &Workbench<'a>, turn: &Turn) -> Result<Vec<Read<'a>>> {
        let &Turn { entry, index, ref memory } = turn;
        let mut reads = Vec::new();
        let mut pieces = if index == 0 { self.other_pieces(bench, entry)? } else { Vec::new() };
        if index < bench.chunks_of(entry) {
            for piece in bench.pieces_of_chunk(entry, index).skip(usize::from(self.live.is_some())) {
                pieces.push((piece, bench.part(entry, piece, memory)?));
            }
        }
        for (piece, part) in pieces {
            if self.in_memory {
                bench.take_held(entry, piece, &part)?;
            } else {
                reads.push(bench.read_into(entry, piece, part)?);
            }
        }
        if index < bench.chunks_of(entry) && self.asked.spilled && self.kept.is_none() {
            reads.push(bench.read_spill(entry, index, memory)?);
        }
        Ok(reads)
    }

    fn compute(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<()> {
        let &Turn { entry, index, ref memory } = turn;
        let chunks = bench.chunks_of(entry);
        if let Some(kept) = self.kept.as_ref().filter(|_| index < chunks) {
            kept.lay(bench, turn)?;
        }
        if let Some(live) = self.live.as_ref().filter(|_| index < chunks) {
            live.take(bench, turn)?;
        }
        if !self.asked.is_whole() {
            return self.calling(bench, entry, self.of_chunk(bench, turn)?)();
        }
        // Without elements, it takes no memory of its own.
        if index == chunks {
            return self.calling(bench, entry, self.in_one_piece(bench, entry, memory)?)();
        }
        let all = self.all.borrow();
        let all = all.as_ref().unwrap_or(memory);
        let plan = Plan::new(bench.store, entry, self.asked.spilled, self.asked.is_wide())?;
        if index < chunks {
            whole::gathered(bench, (entry, index), memory, &plan, all)
        } else {
            whole::scattered(bench, (entry, index - chunks - 1), memory, &plan, all)
        }
    }

    /// Between reads and writes of a whole entry.
    fn called_at(&self, bench: &Workbench<'_>, entry: usize) -> Option<u32> {
        let chunks = bench.chunks_of(entry);
        (self.asked.is_whole() && chunks > 0).then_some(chunks)
    }

    fn call(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<Call> {
        Ok(self.calling(bench, turn.entry, self.in_one_piece(bench, turn.entry, &turn.memory)?))
    }

    fn writes<'a>(&self, bench: &mut Workbench<'a>, turn: &Turn) -> Result<Vec<Write<'a>>> {
        let &Turn { entry, index, ref memory } = turn;
        let chunks = bench.chunks_of(entry);
        let mut pieces = Vec::new();
        let chunk = if self.asked.is_whole() { index.checked_sub(chunks + 1) } else { Some(index) };
        if let Some(chunk) = chunk.filter(|&chunk| chunk < chunks) {
            for piece in bench.pieces_of_chunk(entry, chunk) {
                pieces.push((piece, bench.part(entry, piece, memory)?));
            }
        }
        if index + 1 == self.turns(bench, entry) {
            pieces.extend(self.other_pieces(bench, entry)?);
        }
        let mut writes = Vec::new();
        for (piece, part) in pieces {
            if self.in_memory {
                bench.put_held(entry, piece, &part)?;
            } else {
                writes.push(bench.stage_from(entry, piece, part)?);
            }
        }
        Ok(writes)
    }

    fn counted<'a>(&self, counters: &'a mut Counters) -> Option<&'a mut u64> {
        Some(&mut counters.applied)
    }
}

impl Apply {
    fn calling(&self, bench: &Workbench<'_>, entry: usize, chunk: Chunk) -> Call {
        let (asked, name) = (Arc::clone(&self.asked), bench.store.description().entries[entry].name.clone());
        Box::new(move || asked.function.call(chunk).map_err(|cause| Error::Function { name, cause }))
    }

    fn in_one_piece(&self, bench: &Workbench<'_>, entry: usize, memory: &Shared) -> Result<Chunk> {
        let plan = Plan::new(bench.store, entry, self.asked.spilled, self.asked.is_wide())?;
        let (values, state, gradient) = plan.parts(self.all.borrow().as_ref().unwrap_or(memory))?;
        let state = if self.asked.is_wide() { state } else { self.state(bench, entry, state)? };
        let count = usize::try_from(bench.store.description().entries[entry].elements()).unwrap_or(usize::MAX);
        Ok(Chunk { values, gradient, state, start: 0, count, last: true })
    }

    fn of_chunk(&self, bench: &Workbench<'_>, turn: &Turn) -> Result<Chunk> {
        let &Turn { entry, index: chunk, ref memory } = turn;
        let last = chunk + 1 == self.turns(bench, entry);
        let elements = bench.elements(entry, chunk);
        let (start, count) = (elements.start, elements.len());
        if count == 0 {
            let nothing = inside(memory, 0, 0)?;
            let chunked = bench.store.description().entries[entry].chunked().map(|_| nothing.clone()).collect();
            let gradient = self.asked.spilled.then(|| nothing.clone());
            let state = self.state(bench, entry, chunked)?;
            return Ok(Chunk { values: nothing, gradient, state, start, count, last });
        }
        let element = bench.store.description().entries[entry].dtype.bytes();
        let used = count * usize::try_from(element).unwrap_or(1);
        let values = inside(&bench.part(entry, chunk, memory)?, 0, used)?;
        let gradient = if self.asked.spilled {
            let (part, used) = bench.spill_part(entry, chunk, memory)?;
            Some(inside(&part, 0, used)?)
        } else {
            None
        };
        let chunked = bench.in_chunk(entry, chunk).map(|(_, at, nbytes)| inside(memory, at, nbytes));
        let state = self.state(bench, entry, chunked.collect::<Result<_>>()?)?;
        Ok(Chunk { values, gradient, state, start, count, last })
    }

    /// The state as it is described, from the parts that have the entry's shape.
    fn state(&self, bench: &Workbench<'_>, entry: usize, chunked: Vec<Shared>) -> Result<Vec<Shared>> {
        let description = bench.store.description();
        let described = &description.entries[entry];
        let others = self.others.borrow();
        let (mut chunked, mut other) = (chunked.into_iter(), other_tensors(description, entry));
        let part = |tensor: &memascend_store::StateTensor| {
            let found = if tensor.grain > 0 {
                chunked.next()
            } else {
                others.as_ref().zip(other.next()).and_then(|(memory, (at, nbytes))| memory.part(at, nbytes))
            };
            found.ok_or_else(|| Error::Invalid("a tensor of the state has no memory".into()))
        };
        described.state.iter().map(part).collect()
    }

    /// The pieces of the tensors of other shapes, and the memory of each.
    fn other_pieces(&self, bench: &Workbench<'_>, entry: usize) -> Result<Vec<(u32, Shared)>> {
        let (layout, description) = (bench.store.layout(), bench.store.description());
        let others = self.others.borrow();
        let Some(memory) = &*others else { return Ok(Vec::new()) };
        let mut pieces = Vec::new();
        for index in bench.first_other_piece(entry)..layout.pieces_of(entry) {
            let piece = layout.piece(description, entry, index);
            let Content::Whole { tensor, part } = piece.content else { continue };
            let start = other_tensors(description, entry).nth(tensor as usize).map_or(0, |(at, _)| at);
            let before = usize::try_from(u64::from(part) * WHOLE_PIECE_BYTES).unwrap_or(usize::MAX);
            let bytes = usize::try_from(piece.bytes()).unwrap_or(usize::MAX);
            pieces.push((index, inside(memory, start + before, bytes)?));
        }
        Ok(pieces)
    }
}
