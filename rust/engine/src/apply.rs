//! Runs a caller's function on the tensors of a chunk, or of a whole entry, in staging memory.

use std::{cell::RefCell, sync::Arc};

use memascend_mem::{ChunkRing, OnFork, OwnerId, Pin, Region, Wait};
use memascend_store::{Buffer, Content, Description, PAGE_BYTES, Shared, Store, WHOLE_PIECE_BYTES};

use crate::{
    Counters, Error, Result,
    bench::{Bench, Read, Write},
    caller::Call,
    held::Kept,
    job::{Turn, Work},
    live::Live,
    spill::required,
    whole::{self, Plan},
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

/// What a function failed with.
pub type Cause = Arc<dyn std::error::Error + Send + Sync>;

/// Arithmetic that is not ours.
pub trait Function: Send + Sync {
    /// Computes one chunk in place, on a thread of the engine's; no two functions of an engine at once. It must not wait for
    /// the engine. Memory of the chunk that is held beyond the call is not written again, but it is missing to the engine:
    /// the function has to report it.
    fn call(&self, chunk: Chunk) -> std::result::Result<(), Cause>;
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
    /// Whether it is called once, with all of the entry.
    pub whole: bool,
    /// Whether it gets state in a format of its own in float32, whole: the master of 16-bit values, one moment or two.
    pub wide: bool,
    /// When it is called on an entry that is held, where nothing is to be durable before the end.
    pub late: Late,
}

/// When a function may be called on an entry that memory alone has the newest copy of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Late {
    /// Before the commit, as everywhere: what it writes is staged.
    #[default]
    Never,
    /// Before the commit on copies, which are dropped, and after it in memory. So what it fails with ends the step and not
    /// the run, and what it decides is committed; it has to do the same both times.
    Rehearsed,
    /// After the commit alone: it cannot fail, and decides nothing.
    Always,
}

/// Memory of one size, leased again and again.
pub(crate) struct Slots {
    ring: ChunkRing,
    owner: OwnerId,
    /// Bytes of a slot.
    each: usize,
    /// What is mapped for it.
    pub(crate) bytes: usize,
}

impl Slots {
    pub(crate) fn new(bytes: usize, count: usize, owner: &str) -> Result<Option<Self>> {
        if bytes == 0 {
            return Ok(None);
        }
        let region = Region::new(bytes * count, Pin::Off, OnFork::Wipe, owner)?;
        let ring = ChunkRing::new(&region, bytes, count)?;
        let owner = ring.owner(owner)?;
        Ok(Some(Self { ring, owner, each: bytes, bytes: region.bytes() }))
    }

    /// A slot, if one is free.
    pub(crate) fn lease(&self) -> Result<Option<Shared>> {
        match self.ring.lease(self.owner, Wait::never()) {
            Ok(lease) => Ok(Some(Shared::new(lease))),
            Err(memascend_mem::Error::TimedOut { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Room for the tensors of other shapes than their entry's, of the entry that has the most of them.
pub(crate) fn others(description: &Description) -> Result<Option<Slots>> {
    Slots::new(largest_others(description), OTHERS_AT_ONCE, "other state")
}

/// Room for one entry in one piece, and for the next one, which may have to be a smaller one; the smaller room first.
pub(crate) fn wholes(whole_bytes: usize, whole_next_bytes: usize) -> Result<Vec<Slots>> {
    let mut slots = Vec::new();
    for bytes in [whole_next_bytes.min(whole_bytes), whole_bytes] {
        slots.extend(Slots::new(bytes, 1, "whole parameters")?);
    }
    Ok(slots)
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

/// An [`Application`] that fits its entry.
pub(crate) struct Apply {
    /// Of a rehearsal and what it rehearses, the same.
    asked: Arc<Application>,
    /// The gradient that is kept in memory instead of spilled, where the entry is held.
    kept: Option<Arc<Kept>>,
    /// Bytes of the entry in one piece.
    whole_bytes: usize,
    /// The values that it starts from, where the caller has them and they lie nowhere else in memory.
    live: Option<Live>,
    on: On,
    /// The tensors of other shapes, once it has begun.
    others: RefCell<Option<Shared>>,
    /// All of the entry, once it has begun, where it is wanted whole.
    all: RefCell<Option<Shared>>,
}

/// What it is applied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum On {
    /// What is read and then staged.
    Storage,
    /// The entry in memory, which is neither read nor staged.
    Memory,
    /// Copies of that, which are dropped.
    Copies,
}

impl Apply {
    pub(crate) fn new(store: &Store, entry: usize, asked: Application, whole_bytes: usize) -> Result<Self> {
        let described = &store.description().entries[entry];
        if asked.wide && !asked.whole {
            return Err(Error::Invalid("state is widened of whole entries alone".into()));
        }
        if let Some(tensor) = described.state.iter().find(|tensor| asked.whole && !asked.wide && tensor.grain > 1) {
            let (name, of, grain) = (&described.name, &tensor.name, tensor.grain);
            return Err(Error::Invalid(format!(
                "{of:?} of {name:?} has an item for each {grain} elements, not for each: it is not given in one piece"
            )));
        }
        let needed = Plan::new(store, entry, asked.spilled, asked.wide)?.bytes;
        if asked.whole && needed > whole_bytes {
            let name = &store.description().entries[entry].name;
            return Err(Error::Invalid(format!(
                "{name:?} in one piece takes {needed} bytes, and the engine has {whole_bytes} for that; start it with whole={needed}"
            )));
        }
        let asked = Arc::new(asked);
        let (others, all) = (RefCell::default(), RefCell::default());
        Ok(Self { asked, kept: None, whole_bytes: needed, live: None, on: On::Storage, others, all })
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
        Self { on: On::Memory, ..self }
    }

    /// The same on copies of what memory has, which are dropped.
    pub(crate) fn rehearsal(&self) -> Self {
        let (asked, kept, whole_bytes) = (Arc::clone(&self.asked), self.kept.clone(), self.whole_bytes);
        let (others, all) = (RefCell::default(), RefCell::default());
        Self { asked, kept, whole_bytes, live: None, on: On::Copies, others, all }
    }
}

impl Work for Apply {
    fn nbytes(&self) -> usize {
        // Those of a rehearsal are counted as what it rehearses waits.
        if self.on == On::Copies { 0 } else { self.asked.nbytes }
    }

    fn is_ours(&self) -> bool {
        false
    }

    /// Takes the memory that it needs beside staging chunks; `false` if that is not free.
    fn claim(&self, bench: &Bench<'_>, entry: usize) -> Result<bool> {
        let description = bench.store.description();
        let mut others = self.others.borrow_mut();
        if let (None, Some(slots), Some(_)) = (&*others, &bench.others, description.entries[entry].whole().next()) {
            *others = slots.lease()?;
            if others.is_none() {
                return Ok(false);
            }
        }
        let mut all = self.all.borrow_mut();
        if !self.asked.whole || self.whole_bytes == 0 || all.is_some() {
            return Ok(true);
        }
        let mut fitting = bench.whole.iter().filter(|slots| slots.each >= self.whole_bytes);
        *all = fitting.find_map(|slots| slots.lease().transpose()).transpose()?;
        Ok(all.is_some())
    }

    fn begin(&self, bench: &Bench<'_>, entry: usize) -> Result<()> {
        if self.asked.spilled && self.kept.is_none() {
            required(bench.store, entry)?;
        }
        if self.on != On::Storage {
            return Ok(());
        }
        bench.begin(entry, self.asked.step)
    }

    /// A call for each chunk, or one without elements. Whole: reads, the call, writes.
    fn turns(&self, bench: &Bench<'_>, entry: usize) -> u32 {
        let chunks = bench.chunks_of(entry);
        match (self.asked.whole, self.on) {
            (false, _) => chunks.max(1),
            (true, On::Copies) => chunks + 1,
            (true, _) => 2 * chunks + 1,
        }
    }

    fn reads<'a>(&self, bench: &Bench<'a>, turn: &Turn) -> Result<Vec<Read<'a>>> {
        let &Turn { entry, index, ref memory } = turn;
        let mut reads = Vec::new();
        let mut pieces = if index == 0 { self.other_pieces(bench, entry)? } else { Vec::new() };
        if index < bench.chunks_of(entry) {
            for piece in bench.pieces_of_chunk(entry, index).skip(usize::from(self.live.is_some())) {
                pieces.push((piece, bench.part(entry, piece, memory)?));
            }
        }
        for (piece, part) in pieces {
            if self.on == On::Storage {
                reads.push(bench.read_into(entry, piece, part)?);
            } else {
                bench.take_held(entry, piece, &part)?;
            }
        }
        if index < bench.chunks_of(entry) && self.asked.spilled && self.kept.is_none() {
            reads.push(bench.read_spill(entry, index, memory)?);
        }
        Ok(reads)
    }

    fn compute(&self, bench: &Bench<'_>, turn: &Turn) -> Result<()> {
        let &Turn { entry, index, ref memory } = turn;
        let chunks = bench.chunks_of(entry);
        if let Some(kept) = self.kept.as_ref().filter(|_| index < chunks) {
            kept.lay(bench, turn)?;
        }
        if let Some(live) = self.live.as_ref().filter(|_| index < chunks) {
            live.take(bench, turn)?;
        }
        if !self.asked.whole {
            return self.calling(bench, entry, self.of_chunk(bench, turn)?)();
        }
        // Without elements, it takes no memory of its own.
        if index == chunks {
            return self.calling(bench, entry, self.in_one_piece(bench, entry, memory)?)();
        }
        let all = self.all.borrow();
        let all = all.as_ref().unwrap_or(memory);
        let plan = Plan::new(bench.store, entry, self.asked.spilled, self.asked.wide)?;
        if index < chunks {
            whole::gathered(bench, (entry, index), memory, &plan, all)
        } else {
            whole::scattered(bench, (entry, index - chunks - 1), memory, &plan, all)
        }
    }

    /// Between reads and writes of a whole entry.
    fn called_at(&self, bench: &Bench<'_>, entry: usize) -> Option<u32> {
        let chunks = bench.chunks_of(entry);
        (self.asked.whole && chunks > 0).then_some(chunks)
    }

    fn call(&self, bench: &Bench<'_>, turn: &Turn) -> Result<Call> {
        Ok(self.calling(bench, turn.entry, self.in_one_piece(bench, turn.entry, &turn.memory)?))
    }

    fn writes<'a>(&self, bench: &mut Bench<'a>, turn: &Turn) -> Result<Vec<Write<'a>>> {
        let &Turn { entry, index, ref memory } = turn;
        let chunks = bench.chunks_of(entry);
        let mut pieces = Vec::new();
        let chunk = if self.asked.whole { index.checked_sub(chunks + 1) } else { Some(index) };
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
            match self.on {
                On::Storage => writes.push(bench.stage_from(entry, piece, part)?),
                On::Memory => bench.put_held(entry, piece, &part)?,
                On::Copies => (),
            }
        }
        Ok(writes)
    }

    fn counted<'a>(&self, counters: &'a mut Counters) -> Option<&'a mut u64> {
        (self.on != On::Copies).then_some(&mut counters.applied)
    }
}

impl Apply {
    fn calling(&self, bench: &Bench<'_>, entry: usize, chunk: Chunk) -> Call {
        let (asked, name) = (Arc::clone(&self.asked), bench.store.description().entries[entry].name.clone());
        Box::new(move || asked.function.call(chunk).map_err(|cause| Error::Function { name, cause }))
    }

    fn in_one_piece(&self, bench: &Bench<'_>, entry: usize, memory: &Shared) -> Result<Chunk> {
        let plan = Plan::new(bench.store, entry, self.asked.spilled, self.asked.wide)?;
        let (values, state, gradient) = plan.parts(self.all.borrow().as_ref().unwrap_or(memory))?;
        let state = if self.asked.wide { state } else { self.state(bench, entry, state)? };
        let count = usize::try_from(bench.store.description().entries[entry].elements()).unwrap_or(usize::MAX);
        Ok(Chunk { values, gradient, state, start: 0, count, last: true })
    }

    fn of_chunk(&self, bench: &Bench<'_>, turn: &Turn) -> Result<Chunk> {
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
    fn state(&self, bench: &Bench<'_>, entry: usize, chunked: Vec<Shared>) -> Result<Vec<Shared>> {
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
    fn other_pieces(&self, bench: &Bench<'_>, entry: usize) -> Result<Vec<(u32, Shared)>> {
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

pub(crate) fn inside(memory: &Shared, start: usize, nbytes: usize) -> Result<Shared> {
    let part = memory.part(start, nbytes);
    part.ok_or_else(|| Error::Invalid(format!("{nbytes} bytes from {start} on of {} staged ones", memory.len())))
}
