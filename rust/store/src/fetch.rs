//! Reads the values of a whole unit into one buffer, ahead of other I/O.

use std::{sync::Arc, time::Instant};

use memascend_mem::Wait;

use crate::{Buffer, Error, PartFetch, Result, Store};

/// A read of a unit's values into memory.
///
/// While the devices read the slots of a `Fetch`, nothing is staged into these slots: [`Store::begin`] waits until the
/// devices have ended the reads, even if the caller never calls [`Fetch::wait`]. Dropping a `Fetch` waits for the
/// devices.
pub struct Fetch<B: Buffer + Sync> {
    version: u64,
    /// `None` if no record of the unit has values.
    part: Option<PartFetch<B>>,
    store: Arc<Store>,
}

impl Store {
    /// Begins to read the values of all records of a unit into `memory`. [`Layout::in_unit`](crate::Layout::in_unit)
    /// returns the offset of a record's values in `memory`. All values are of the same commit. One read covers the
    /// values of records that are adjacent on storage.
    ///
    /// `memory` must have [`Layout::unit_bytes`](crate::Layout::unit_bytes) bytes. Reads are faster if `memory` begins
    /// on a page.
    pub fn fetch<B: Buffer + Sync>(self: &Arc<Self>, unit: usize, memory: B) -> Result<Fetch<B>> {
        let parts = Arc::new(self.parts(unit, u64::MAX)?);
        let wanted = self.layout.unit_bytes(unit);
        if memory.len() as u64 != wanted {
            let name = &self.description.units[unit];
            return Err(Error::Invalid(format!(
                "unit {name:?} needs a buffer of {wanted} bytes, not {}",
                memory.len()
            )));
        }
        let part = if wanted == 0 { None } else { Some(parts.begin(0, memory)?) };
        Ok(Fetch { version: parts.version(), part, store: Arc::clone(self) })
    }
}

impl<B: Buffer + Sync> Fetch<B> {
    /// True once the devices have ended all reads. Never waits.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.part.as_ref().is_none_or(PartFetch::is_done)
    }

    /// Waits for the reads and verifies every extent that was read. Returns the newest version among the records, or 0
    /// if no record has values. Fails if `wait` ends first. Once the reads have ended, every call returns the same
    /// result.
    pub fn wait(&self, wait: Wait<'_>) -> Result<u64> {
        let began = Instant::now();
        let result = self.part.as_ref().map_or(Ok(()), |part| part.wait(wait));
        self.store.counters.waited(began.elapsed());
        result.map(|()| self.version)
    }
}
