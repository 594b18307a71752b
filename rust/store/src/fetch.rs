//! Reads the values of a whole unit into one extent of memory, ahead of other I/O.

use std::{sync::Arc, time::Instant};

use memascend_mem::Wait;

use crate::{Buffer, Error, PartFetch, Result, Store};

/// The values of a unit on their way into memory.
///
/// Until the devices are done with it nothing is staged into the slots that it reads: a step after the next commit waits
/// for the devices, and not for the caller of [`Fetch::wait`]. Dropping it waits for the devices.
pub struct Fetch<B: Buffer + Sync> {
    version: u64,
    /// `None` where none of the unit's records has values.
    part: Option<PartFetch<B>>,
    store: Arc<Store>,
}

impl Store {
    /// Begins to read the values of all records of a unit, each to [`Layout::in_unit`](crate::Layout::in_unit) in
    /// `memory`. Records that lie side by side in one slot are one read. All of them are of one commit.
    ///
    /// Memory that does not begin on a page is right, and slower.
    pub fn fetch<B: Buffer + Sync>(self: &Arc<Self>, unit: usize, memory: B) -> Result<Fetch<B>> {
        let parts = Arc::new(self.parts(unit, u64::MAX)?);
        let wanted = self.layout.unit_bytes(unit);
        if memory.len() as u64 != wanted {
            let name = &self.description.units[unit];
            return Err(Error::Invalid(format!("unit {name:?} has {wanted} bytes, not {}", memory.len())));
        }
        let part = if wanted == 0 { None } else { Some(parts.begin(0, memory)?) };
        Ok(Fetch { version: parts.version(), part, store: Arc::clone(self) })
    }
}

impl<B: Buffer + Sync> Fetch<B> {
    /// Whether the devices are done with it. Never waits.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.part.as_ref().is_none_or(PartFetch::is_done)
    }

    /// Waits, checks every extent, and gives the newest version among the records: 0 where none has values. Waiting
    /// again says the same again.
    pub fn wait(&self, wait: Wait<'_>) -> Result<u64> {
        let began = Instant::now();
        let result = self.part.as_ref().map_or(Ok(()), |part| part.wait(wait));
        self.store.counters.waited(began.elapsed());
        result.map(|()| self.version)
    }
}
