//! Computes the offset of each part of a store, and of each extent in a part.
//!
//! Labels and roots have fixed places. A root names the offset of each other part, and the description determines the
//! length of the part.
//!
//! A new store has these parts, in this order: `labels | root 0 | root 1 | description | table 0 | table 1 | values A |
//! values B | state A | state B | spill | description again | labels again`

use crate::{
    Description, Dtype, Record, Result,
    fields::Malformed,
    places::{Devices, Lengths, Places, add, paged, too_large},
};

/// The size of a page in bytes. Every part and every extent of a store begins on a page.
pub const PAGE_BYTES: u64 = 4096;
/// The alignment in bytes of the tensors that share a chunk of state: a cache line.
const TENSOR_ALIGN: u64 = 64;
/// The largest size in bytes of an extent of a state tensor without a grain.
pub const WHOLE_EXTENT_BYTES: u64 = 1 << 20;

/// The index range of a record's extents, and the offsets of the record's values, state and spilled gradient.
#[derive(Debug, Clone, Copy)]
pub struct RecordLayout {
    /// The index of the record's first extent among all extents of the store.
    pub(crate) first_extent: u32,
    /// The count of the record's extents. The extents of values come first, then the extents of chunked state, then the
    /// extents of each state tensor without a grain.
    pub(crate) extents: u32,
    /// The count of chunks. Each chunk is one extent of values and, if the record has chunked state, also one extent of
    /// state.
    pub(crate) chunks: u32,
    /// Offset of the values from the start of the values area.
    pub(crate) values_at: u64,
    /// Offset of the state from the start of the state area.
    pub(crate) state_at: u64,
    /// Offset of the spilled gradient from the start of the spill area, or of the area of second places.
    spill_at: u64,
}

/// The data in an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// One chunk of the record's values.
    Values {
        /// The index of the chunk.
        chunk: u32,
    },
    /// One chunk of all state tensors with a grain, side by side.
    State {
        /// The index of the chunk.
        chunk: u32,
    },
    /// One part of a state tensor without a grain.
    Whole {
        /// The index of the tensor among the record's state tensors without a grain.
        tensor: u32,
        /// The index of the part in the tensor.
        part: u32,
    },
}

/// An extent: whole pages that are read, written and checksummed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The data in the extent.
    pub content: Content,
    /// The size of the data in bytes, without the padding of the last page.
    pub used_bytes: u64,
    /// Offset from the start of the values area or of the state area.
    pub(crate) at: u64,
}

impl Extent {
    /// Returns the size in bytes of the extent on storage: whole pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        paged(self.used_bytes)
    }
}

/// The offsets and lengths of a store's parts, units and records.
#[derive(Debug)]
pub struct Layout {
    pub(crate) devices: Devices,
    records: Box<[RecordLayout]>,
    /// For each unit, the offset of its values in the values area. The last item is the length of the values area.
    units: Box<[u64]>,
    pub(crate) description_bytes: u64,
    pub(crate) places: Places,
    pub(crate) table_pages: u64,
    slot_bytes: u64,
    spill_bytes: u64,
    extents: u32,
    /// The offset in the volume at which the last part in `places` ends.
    end: u64,
}

/// Returns the size in bytes of a chunk of state for `elements` elements. The chunk has the items of all state tensors
/// with a grain, side by side.
fn chunk_bytes(record: &Record, elements: u64) -> u64 {
    record.chunked().map(|tensor| tensor.bytes_for(elements).next_multiple_of(TENSOR_ALIGN)).sum()
}

impl Layout {
    /// Lays out a new store. The caller has checked the description.
    pub(crate) fn new(description: &Description, devices: Devices) -> Result<Self> {
        let (mut layout, lengths) = Self::measured(description, devices)?;
        (layout.places, layout.end) = Places::in_a_row(&lengths, devices.first_offset())?;
        Ok(layout)
    }

    /// Lays out an existing store with the `places` that its root names. The caller has checked the description. The
    /// inner error says why `places` are impossible.
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

    /// Computes the length of every area, and every offset within an area. Leaves `places` and `end` unset.
    fn measured(description: &Description, devices: Devices) -> Result<(Self, Lengths)> {
        let chunk = u64::from(description.chunk_elements);
        let (mut values, mut state, mut spill, mut extents) = (0, 0, 0, 0_u64);
        let mut records = Vec::with_capacity(description.records.len());
        let mut units = vec![None; description.units.len()];
        for record in &description.records {
            let elements = record.elements();
            let chunks = elements.div_ceil(chunk);
            let has_state = record.chunked().next().is_some() && chunks > 0;
            let whole_parts: u64 = record.whole().map(|tensor| tensor.nbytes().div_ceil(WHOLE_EXTENT_BYTES)).sum();
            let of_record = chunks * if has_state { 2 } else { 1 } + whole_parts;
            units[record.unit as usize].get_or_insert(values);
            let first_extent = u32::try_from(extents).map_err(|_| too_large())?;
            add(&mut extents, of_record)?;
            records.push(RecordLayout {
                first_extent,
                extents: u32::try_from(of_record).map_err(|_| too_large())?,
                chunks: u32::try_from(chunks).map_err(|_| too_large())?,
                values_at: values,
                state_at: state,
                spill_at: spill,
            });
            add(&mut values, paged(elements * record.dtype.bytes()))?;
            if has_state {
                let full = paged(chunk_bytes(record, chunk));
                add(&mut state, (chunks - 1).checked_mul(full).ok_or_else(too_large)?)?;
                add(&mut state, paged(chunk_bytes(record, elements - (chunks - 1) * chunk)))?;
            }
            for tensor in record.whole() {
                add(&mut state, paged(tensor.nbytes()))?;
            }
            if let Some(dtype) = record.spill {
                add(&mut spill, paged(elements * dtype.bytes()))?;
            }
        }
        let extents = u32::try_from(extents).map_err(|_| too_large())?;
        // A unit without records begins where the next unit begins.
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
        let table_pages = crate::table::Sections::new(description, extents).pages();
        let lengths = Lengths {
            description: paged(description_bytes),
            table: table_pages * PAGE_BYTES,
            values: paged(values),
            state: paged(state),
            spill: paged(spill),
        };
        let layout = Self {
            devices,
            records: records.into(),
            units: starts.into(),
            description_bytes,
            places: Places::default(),
            table_pages,
            slot_bytes: lengths.values + lengths.state,
            spill_bytes: lengths.spill,
            extents,
            end: 0,
        };
        Ok((layout, lengths))
    }

    /// Returns the size in bytes of the store with its second labels, but without second places for gradients and
    /// without a log. The store's file or device may be larger.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.devices.with_second_labels(self.end)
    }

    /// Returns the offset at which the last part in `places` ends. The second places for gradients, and the log, come
    /// after this offset.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Returns the offset of the second label of device `index` in a volume of `volume_bytes`, or `None` if the volume
    /// is so short that another part of the store takes this offset.
    pub(crate) fn second_label_offset(&self, volume_bytes: u64, index: u32) -> Option<u64> {
        self.devices.second_label_offset(volume_bytes, index).filter(|&at| at >= self.end)
    }

    /// Returns the number of extents in the store.
    #[must_use]
    pub fn extents(&self) -> u32 {
        self.extents
    }

    /// Returns the size in bytes of one slot of all records together: their values and their state.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    pub(crate) fn record(&self, record: usize) -> &RecordLayout {
        &self.records[record]
    }

    /// Returns the size in bytes of a unit's values. A lease for the unit has this size.
    #[must_use]
    pub fn unit_bytes(&self, unit: usize) -> u64 {
        self.units[unit + 1] - self.units[unit]
    }

    /// Returns the offset of a record's values among the values of its unit.
    #[must_use]
    pub fn in_unit(&self, record: usize, unit: usize) -> u64 {
        self.records[record].values_at - self.units[unit]
    }

    /// Returns the number of extents of a record.
    #[must_use]
    pub fn extents_of(&self, record: usize) -> u32 {
        self.records[record].extents
    }

    /// Returns the number of chunks of a record.
    #[must_use]
    pub fn chunks_of(&self, record: usize) -> u32 {
        self.records[record].chunks
    }

    /// Returns extent number `index` of a record, counted from 0.
    #[must_use]
    pub fn extent(&self, description: &Description, record: usize, index: u32) -> Extent {
        let (place, record) = (&self.records[record], &description.records[record]);
        let chunk_elements = u64::from(description.chunk_elements);
        let of_chunk = |chunk: u32| (record.elements() - u64::from(chunk) * chunk_elements).min(chunk_elements);
        if index < place.chunks {
            let at = place.values_at + u64::from(index) * chunk_elements * record.dtype.bytes();
            let used_bytes = of_chunk(index) * record.dtype.bytes();
            return Extent { content: Content::Values { chunk: index }, used_bytes, at };
        }
        let full = paged(chunk_bytes(record, chunk_elements));
        let mut index = index - place.chunks;
        let mut at = place.state_at;
        if record.chunked().next().is_some() && place.chunks > 0 {
            if index < place.chunks {
                let used_bytes = chunk_bytes(record, of_chunk(index));
                return Extent {
                    content: Content::State { chunk: index },
                    used_bytes,
                    at: at + u64::from(index) * full,
                };
            }
            index -= place.chunks;
            at += u64::from(place.chunks - 1) * full + paged(chunk_bytes(record, of_chunk(place.chunks - 1)));
        }
        for (tensor, spec) in (0..).zip(record.whole()) {
            let parts = spec.nbytes().div_ceil(WHOLE_EXTENT_BYTES) as u32;
            if index < parts {
                let before = u64::from(index) * WHOLE_EXTENT_BYTES;
                let used_bytes = (spec.nbytes() - before).min(WHOLE_EXTENT_BYTES);
                return Extent { content: Content::Whole { tensor, part: index }, used_bytes, at: at + before };
            }
            index -= parts;
            at += paged(spec.nbytes());
        }
        unreachable!("the record has only {} extents", place.extents)
    }

    /// Returns the offset of an extent in the volume, in slot 0 or 1.
    #[must_use]
    pub fn offset(&self, extent: &Extent, slot: usize) -> u64 {
        let area =
            if matches!(extent.content, Content::Values { .. }) { &self.places.values } else { &self.places.state };
        area[slot] + extent.at
    }

    /// Returns the offset in the volume of a record's first place for a spilled gradient, which is in the spill area.
    #[must_use]
    pub fn spill_offset(&self, record: usize) -> u64 {
        self.places.spill + self.in_spill(record)
    }

    /// Returns the offset, from the start of the spill area, of the place for a record's spilled gradient. The record's
    /// second place has the same offset from the start of the area of second places.
    pub(crate) fn in_spill(&self, record: usize) -> u64 {
        self.records[record].spill_at
    }

    /// Returns the size of the spill area in bytes.
    pub(crate) fn spill_area_bytes(&self) -> u64 {
        self.spill_bytes
    }
}

impl Description {
    /// Returns the number of elements in a chunk of a record: `chunk_elements`, or fewer in the last chunk.
    #[must_use]
    pub fn elements_of_chunk(&self, record: usize, chunk: u32) -> usize {
        let before = u64::from(chunk) * u64::from(self.chunk_elements);
        self.records[record].elements().saturating_sub(before).min(u64::from(self.chunk_elements)) as usize
    }

    /// Yields `(dtype, offset in the chunk, bytes)` of each state tensor with a grain, for a chunk of `elements`
    /// elements.
    pub fn in_chunk(&self, record: usize, elements: usize) -> impl Iterator<Item = (Dtype, usize, usize)> {
        self.records[record].chunked().scan(0, move |at, tensor| {
            let (start, bytes) = (*at, tensor.bytes_for(elements as u64) as usize);
            *at += bytes.next_multiple_of(TENSOR_ALIGN as usize);
            Some((tensor.dtype, start, bytes))
        })
    }

    /// Returns the size in bytes of the largest extent of state, and of the largest extent of values. Staging buffers
    /// must have at least these sizes.
    #[must_use]
    pub fn staging_bytes(&self) -> (u64, u64) {
        let largest = |bytes: &dyn Fn(&Record, u64) -> u64| {
            let of = |record: &Record| paged(bytes(record, record.elements().min(u64::from(self.chunk_elements))));
            self.records.iter().map(of).max().unwrap_or(0)
        };
        let whole =
            |record: &Record| record.whole().map(|tensor| tensor.nbytes().min(WHOLE_EXTENT_BYTES)).max().unwrap_or(0);
        let state = largest(&|record, elements| chunk_bytes(record, elements).max(whole(record)));
        (state, largest(&|record, elements| elements * record.dtype.bytes()))
    }
}
