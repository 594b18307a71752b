//! Computes from a description how many bytes its store takes on storage and in memory.

use memascend_nvme::STRIPE_BYTES_DEFAULT;

use crate::{
    Description, Error, Layout, Result,
    index::Index,
    places::Devices,
    spill::Spill,
    store::{buffer_bytes, names_bytes},
    table::Sections,
};

/// The bytes that a store takes on storage and in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes on storage: the whole store, without a log and without second places for gradients.
    pub total_bytes: u64,
    /// The sum over all records of the bytes of one slot, for values and state.
    pub slot_bytes: u64,
    /// The bytes of memory of an open store that grow with the state: the same as [`Info::index_bytes`](crate::Info).
    pub index_bytes: u64,
    /// The bytes of memory of an open store that do not grow with the state: the same as
    /// [`Info::buffer_bytes`](crate::Info).
    pub buffer_bytes: u64,
    /// For each unit, the bytes of memory for its values.
    pub unit_bytes: Vec<u64>,
    /// For each record, the bytes of memory that it takes in the RAM tier: for its values, and for its state.
    pub record_bytes: Vec<(u64, u64)>,
}

impl Description {
    /// Returns the sizes of a store with this description on `devices` devices. Opens nothing.
    pub fn sizes(&self, devices: usize, stripe_bytes: Option<u64>) -> Result<Sizes> {
        self.check()?;
        let count = u32::try_from(devices).ok().filter(|&count| count > 0 && devices <= memascend_nvme::DEVICES_MAX);
        let count = count.ok_or_else(|| {
            Error::Invalid(format!("a store can have 1 to {} devices, not {devices}", memascend_nvme::DEVICES_MAX))
        })?;
        let layout = Layout::new(self, Devices { count, stripe_bytes: stripe_bytes.unwrap_or(STRIPE_BYTES_DEFAULT) })?;
        let sections = Sections::new(self, layout.extents());
        Ok(Sizes {
            total_bytes: layout.total_bytes(),
            slot_bytes: layout.slot_bytes(),
            index_bytes: Index::bytes(self, &layout, &sections) + names_bytes(self) + Spill::bytes(self, &layout),
            buffer_bytes: buffer_bytes(self),
            record_bytes: (0..self.records.len()).map(|record| layout.ram_tier_bytes(self, record)).collect(),
            unit_bytes: (0..self.units.len()).map(|unit| layout.unit_bytes(unit)).collect(),
        })
    }
}
