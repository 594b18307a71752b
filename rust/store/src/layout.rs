//! Computes where everything lies. Lengths follow from the description; where each part begins, the root says.
//!
//! A new store: `labels | root 0 | root 1 | description | table 0 | table 1 | values A | values B | state A | state B |
//! spill | description again | labels again`

use crate::{
    Description, Dtype, Entry, Result,
    fields::Malformed,
    places::{Devices, Lengths, Places, add, paged, too_large},
};

/// What everything is aligned to.
pub const PAGE_BYTES: u64 = 4096;
/// Tensors side by side in a chunk begin on a cache line.
const TENSOR_ALIGN: u64 = 64;
/// The largest piece of a tensor that lies by itself.
pub const WHOLE_PIECE_BYTES: u64 = 1 << 20;

/// Where an entry's pieces lie.
#[derive(Debug, Clone, Copy)]
pub struct EntryLayout {
    /// The number of its first piece in the store.
    pub(crate) first_piece: u32,
    /// Its pieces: values, then chunked state, then each tensor that lies by itself.
    pub(crate) pieces: u32,
    /// Pieces of its values, and of its chunked state where it has any.
    pub(crate) chunks: u32,
    /// From the start of the values area, of the state area, of the spill area.
    pub(crate) values_at: u64,
    pub(crate) state_at: u64,
    spill_at: u64,
}

/// What a piece holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Values of the entry.
    Values {
        /// The chunk.
        chunk: u32,
    },
    /// The state tensors of the entry's shape, side by side.
    State {
        /// The chunk.
        chunk: u32,
    },
    /// A part of a state tensor that lies by itself.
    Whole {
        /// Which of those.
        tensor: u32,
        /// Which part of it.
        part: u32,
    },
}

/// A piece: the grain of I/O and of checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// What it holds.
    pub content: Content,
    /// Bytes of it, without what fills the last page.
    pub used_bytes: u64,
    /// From the start of its area.
    pub(crate) at: u64,
}

impl Piece {
    /// Bytes that are moved: whole pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        paged(self.used_bytes)
    }
}

/// Where everything lies.
#[derive(Debug)]
pub struct Layout {
    pub(crate) devices: Devices,
    entries: Box<[EntryLayout]>,
    /// Where each unit's values begin in the values area, and the end.
    units: Box<[u64]>,
    pub(crate) description_bytes: u64,
    pub(crate) places: Places,
    pub(crate) table_pages: u64,
    slot_bytes: u64,
    pieces: u32,
    end: u64,
}

/// Bytes of `elements` of each of the chunked tensors, side by side.
fn chunk_bytes(entry: &Entry, elements: u64) -> u64 {
    entry.chunked().map(|tensor| tensor.bytes_for(elements).next_multiple_of(TENSOR_ALIGN)).sum()
}

impl Layout {
    /// Lays out what a checked description describes, as a new store has it.
    pub(crate) fn new(description: &Description, devices: Devices) -> Result<Self> {
        let (mut layout, lengths) = Self::measured(description, devices)?;
        (layout.places, layout.end) = Places::in_a_row(&lengths, devices.first_offset())?;
        Ok(layout)
    }

    /// Lays out what a checked description describes at the places that a root names.
    pub(crate) fn placed(
        description: &Description,
        devices: Devices,
        places: Places,
    ) -> Result<std::result::Result<Self, Malformed>> {
        let (mut layout, lengths) = Self::measured(description, devices)?;
        Ok(places.end(&lengths, devices.first_offset()).map(|end| {
            (layout.places, layout.end) = (places, end);
            layout
        }))
    }

    /// Everything but the places.
    fn measured(description: &Description, devices: Devices) -> Result<(Self, Lengths)> {
        let chunk = u64::from(description.chunk_elements);
        let (mut values, mut state, mut spill, mut pieces) = (0, 0, 0, 0_u64);
        let mut entries = Vec::with_capacity(description.entries.len());
        let mut units = vec![None; description.units.len()];
        for entry in &description.entries {
            let elements = entry.elements();
            let chunks = elements.div_ceil(chunk);
            let has_state = entry.chunked().next().is_some() && chunks > 0;
            let whole_parts: u64 = entry.whole().map(|tensor| tensor.nbytes().div_ceil(WHOLE_PIECE_BYTES)).sum();
            let of_entry = chunks * if has_state { 2 } else { 1 } + whole_parts;
            units[entry.unit as usize].get_or_insert(values);
            let first_piece = u32::try_from(pieces).map_err(|_| too_large())?;
            add(&mut pieces, of_entry)?;
            entries.push(EntryLayout {
                first_piece,
                pieces: u32::try_from(of_entry).map_err(|_| too_large())?,
                chunks: u32::try_from(chunks).map_err(|_| too_large())?,
                values_at: values,
                state_at: state,
                spill_at: spill,
            });
            add(&mut values, paged(elements * entry.dtype.bytes()))?;
            if has_state {
                let full = paged(chunk_bytes(entry, chunk));
                add(&mut state, (chunks - 1).checked_mul(full).ok_or_else(too_large)?)?;
                add(&mut state, paged(chunk_bytes(entry, elements - (chunks - 1) * chunk)))?;
            }
            for tensor in entry.whole() {
                add(&mut state, paged(tensor.nbytes()))?;
            }
            if let Some(dtype) = entry.spill {
                add(&mut spill, paged(elements * dtype.bytes()))?;
            }
        }
        let pieces = u32::try_from(pieces).map_err(|_| too_large())?;
        // A unit without entries is where the next one is.
        let mut next = values;
        let mut starts: Vec<u64> = units
            .iter()
            .rev()
            .map(|at| {
                next = at.unwrap_or(next);
                next
            })
            .collect();
        starts.reverse();
        starts.push(values);

        let description_bytes = description.encode().len() as u64;
        let table_pages = crate::table::Sections::new(description, pieces).pages();
        let lengths = Lengths {
            description: paged(description_bytes),
            table: table_pages * PAGE_BYTES,
            values: paged(values),
            state: paged(state),
            spill: paged(spill),
        };
        let layout = Self {
            devices,
            entries: entries.into(),
            units: starts.into(),
            description_bytes,
            places: Places::default(),
            table_pages,
            slot_bytes: lengths.values + lengths.state,
            pieces,
            end: 0,
        };
        Ok((layout, lengths))
    }

    /// Bytes of the whole store. A file may be longer, and a device larger.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.devices.with_second_labels(self.end)
    }

    /// Where the last thing ends whose place is known.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Where the second label of a device lies in a volume of so many bytes; `None` where something else lies there.
    pub(crate) fn second_label_offset(&self, volume_bytes: u64, index: u32) -> Option<u64> {
        self.devices.second_label_offset(volume_bytes, index).filter(|&at| at >= self.end)
    }

    /// Pieces of the whole store.
    #[must_use]
    pub fn pieces(&self) -> u32 {
        self.pieces
    }

    /// Bytes of one slot of all values and state: what "of state" means where a figure is given for it.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    pub(crate) fn entry(&self, entry: usize) -> &EntryLayout {
        &self.entries[entry]
    }

    /// Bytes of a unit's values: what a lease for it needs.
    #[must_use]
    pub fn unit_bytes(&self, unit: usize) -> u64 {
        self.units[unit + 1] - self.units[unit]
    }

    /// Where in its unit's bytes the values of an entry begin.
    #[must_use]
    pub fn in_unit(&self, entry: usize, unit: usize) -> u64 {
        self.entries[entry].values_at - self.units[unit]
    }

    /// How many pieces an entry has.
    #[must_use]
    pub fn pieces_of(&self, entry: usize) -> u32 {
        self.entries[entry].pieces
    }

    /// How many chunks an entry has.
    #[must_use]
    pub fn chunks_of(&self, entry: usize) -> u32 {
        self.entries[entry].chunks
    }

    /// A piece of an entry; `index` counts from 0.
    #[must_use]
    pub fn piece(&self, description: &Description, entry: usize, index: u32) -> Piece {
        let (place, entry) = (&self.entries[entry], &description.entries[entry]);
        let chunk_elements = u64::from(description.chunk_elements);
        let of_chunk = |chunk: u32| (entry.elements() - u64::from(chunk) * chunk_elements).min(chunk_elements);
        if index < place.chunks {
            let at = place.values_at + u64::from(index) * chunk_elements * entry.dtype.bytes();
            let used_bytes = of_chunk(index) * entry.dtype.bytes();
            return Piece { content: Content::Values { chunk: index }, used_bytes, at };
        }
        let full = paged(chunk_bytes(entry, chunk_elements));
        let mut index = index - place.chunks;
        let mut at = place.state_at;
        if entry.chunked().next().is_some() && place.chunks > 0 {
            if index < place.chunks {
                let used_bytes = chunk_bytes(entry, of_chunk(index));
                return Piece {
                    content: Content::State { chunk: index },
                    used_bytes,
                    at: at + u64::from(index) * full,
                };
            }
            index -= place.chunks;
            at += u64::from(place.chunks - 1) * full + paged(chunk_bytes(entry, of_chunk(place.chunks - 1)));
        }
        for (tensor, spec) in (0..).zip(entry.whole()) {
            let parts = spec.nbytes().div_ceil(WHOLE_PIECE_BYTES) as u32;
            if index < parts {
                let before = u64::from(index) * WHOLE_PIECE_BYTES;
                let used_bytes = (spec.nbytes() - before).min(WHOLE_PIECE_BYTES);
                return Piece { content: Content::Whole { tensor, part: index }, used_bytes, at: at + before };
            }
            index -= parts;
            at += paged(spec.nbytes());
        }
        unreachable!("an entry has {} pieces", place.pieces)
    }

    /// Where a piece lies in `slot`, for tools that look at a store from outside.
    #[must_use]
    pub fn offset_in(&self, piece: &Piece, slot: usize) -> u64 {
        self.offset(piece, slot.min(1))
    }

    pub(crate) fn offset(&self, piece: &Piece, slot: usize) -> u64 {
        let area =
            if matches!(piece.content, Content::Values { .. }) { &self.places.values } else { &self.places.state };
        area[slot] + piece.at
    }

    /// The spill extent of an entry: where it begins.
    #[must_use]
    pub fn spill_offset(&self, entry: usize) -> u64 {
        self.places.spill + self.entries[entry].spill_at
    }
}

impl Description {
    /// Elements of a chunk of an entry: all but the last are full.
    #[must_use]
    pub fn elements_of_chunk(&self, entry: usize, chunk: u32) -> usize {
        let before = u64::from(chunk) * u64::from(self.chunk_elements);
        self.entries[entry].elements().saturating_sub(before).min(u64::from(self.chunk_elements)) as usize
    }

    /// The chunked state tensors of an entry, as they lie in a chunk of `elements`: (type, where it begins, bytes).
    pub fn in_chunk(&self, entry: usize, elements: usize) -> impl Iterator<Item = (Dtype, usize, usize)> {
        self.entries[entry].chunked().scan(0, move |at, tensor| {
            let (start, bytes) = (*at, tensor.bytes_for(elements as u64) as usize);
            *at += bytes.next_multiple_of(TENSOR_ALIGN as usize);
            Some((tensor.dtype, start, bytes))
        })
    }

    /// The largest piece of state, and of values, of any entry: what a staging chunk must hold.
    #[must_use]
    pub fn staging_bytes(&self) -> (u64, u64) {
        let largest = |bytes: &dyn Fn(&Entry, u64) -> u64| {
            let of = |entry: &Entry| paged(bytes(entry, entry.elements().min(u64::from(self.chunk_elements))));
            self.entries.iter().map(of).max().unwrap_or(0)
        };
        let whole =
            |entry: &Entry| entry.whole().map(|tensor| tensor.nbytes().min(WHOLE_PIECE_BYTES)).max().unwrap_or(0);
        let state = largest(&|entry, elements| chunk_bytes(entry, elements).max(whole(entry)));
        (state, largest(&|entry, elements| elements * entry.dtype.bytes()))
    }
}
