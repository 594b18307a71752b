//! Reads records extent by extent, from the RAM tier or from the live slots. Checks the checksum of each extent before
//! it returns the extent, unless only the RAM tier has the extent's version.

use std::ops::Range;

use crate::{Buffer, Error, Result, Store, Transfer, buffer::bytes_of, holds::Hold, layout::Extent, ram_tier::RamTier};

/// Where the bytes of an extent come from.
enum Source<B: Buffer> {
    Storage(Transfer<B>),
    /// The RAM tier: the buffer has the extent already.
    Memory(B),
}

/// The read of an extent. Dropping an `ExtentRead` waits for the device.
pub struct ExtentRead<'a, B: Buffer> {
    // Fields are dropped in this order: `hold` keeps the slot until the device is done with `source`.
    source: Source<B>,
    hold: Hold<&'a Store>,
    extent: u32,
    place: (u64, u64),
}

impl Store {
    /// Begins to read a live extent into `buffer`, which must have the size of the extent's whole pages. If the extent
    /// is in RAM, copies the extent from RAM.
    ///
    /// # Errors
    /// Fails if there is no such record or extent, if `buffer` has another size, or if only memory had the newest
    /// version and no longer has it. If the extent is not in RAM, also fails if gradients of the log, or a deferred
    /// update, are not applied in the live slot.
    pub fn read<B: Buffer>(&self, record: usize, extent: u32, buffer: B) -> Result<ExtentRead<'_, B>> {
        let read = self.read_from(self.ram_tier().as_deref(), record, extent, buffer)?;
        if matches!(read.source, Source::Storage(_)) {
            read.hold.require_newest()?;
        }
        Ok(read)
    }

    /// Returns the error for reading a record if gradients of the log are not applied in its live slot.
    pub(crate) fn not_applied(&self, record: usize) -> Error {
        let name = &self.description.records[record].name;
        Error::Usage(format!(
            "the gradients of the log are not applied to {name:?} yet, so its state is old: replay the log first"
        ))
    }

    /// Does what [`Store::read`] does, with the RAM tier that the caller passes as `memory`. Does not check that the
    /// slot has the record's newest state.
    pub(crate) fn read_from<B: Buffer>(
        &self,
        memory: Option<&RamTier>,
        record: usize,
        extent: u32,
        mut buffer: B,
    ) -> Result<ExtentRead<'_, B>> {
        let layout = self.fitting_extent(record, extent, buffer.len())?;
        let hold = Hold::live(self, &mut self.index.lock(), record, extent..extent + 1);
        let place = (self.layout.offset(&layout, hold.slot), layout.bytes());
        let source = if self.copy_in_ram(memory, (record, extent), hold.version, &mut buffer) {
            Source::Memory(buffer)
        } else if hold.alone {
            return Err(self.lost(record));
        } else {
            Source::Storage(Transfer::begun(self.volume.read(buffer, place.0))?)
        };
        Ok(ExtentRead { source, hold, extent, place })
    }

    /// Begins to read an extent from the live slot of a record, even if memory or the log has a newer version of the
    /// extent.
    pub fn read_slot<B: Buffer>(&self, record: usize, extent: u32, buffer: B) -> Result<ExtentRead<'_, B>> {
        let layout = self.fitting_extent(record, extent, buffer.len())?;
        let hold = Hold::stored(self, &mut self.index.lock(), record, extent..extent + 1);
        let place = (self.layout.offset(&layout, hold.slot), layout.bytes());
        let source = Source::Storage(Transfer::begun(self.volume.read(buffer, place.0))?);
        Ok(ExtentRead { source, hold, extent, place })
    }

    /// Returns extent number `extent` of a record. Fails if the record has no such extent, or if the extent's size is
    /// not `nbytes`.
    pub(crate) fn fitting_extent(&self, record: usize, extent: u32, nbytes: usize) -> Result<Extent> {
        self.known(record)?;
        let name = &self.description.records[record].name;
        if extent >= self.layout.extents_of(record) {
            return Err(Error::Invalid(format!(
                "{name:?} has only {} extents, counted from 0: there is no extent {extent}",
                self.layout.extents_of(record)
            )));
        }
        let layout = self.layout.extent(&self.description, record, extent);
        if nbytes as u64 != layout.bytes() {
            let wanted = layout.bytes();
            return Err(Error::Invalid(format!(
                "extent {extent} of {name:?} needs a buffer of {wanted} bytes, not {nbytes}"
            )));
        }
        Ok(layout)
    }

    /// True if `buffer` and an extent in the slot that readers see have the same size and checksum. False if the record
    /// has no such extent, or if gradients of the log, or a deferred update, are not applied in that slot.
    pub fn holds(&self, record: usize, extent: u32, buffer: &impl Buffer) -> Result<bool> {
        self.known(record)?;
        if extent >= self.layout.extents_of(record) {
            return Ok(false);
        }
        let place = self.layout.extent(&self.description, record, extent);
        let number = (self.layout.record(record).first_extent + extent) as usize;
        let (version, wanted) = {
            let index = self.index.lock();
            let slots = &index.records[record];
            if index.log.is_ahead(record) && !slots.is_settled() {
                return Ok(false);
            }
            let seen = slots.seen_slot();
            (slots.versions[seen], index.sum(seen, number))
        };
        Ok(buffer.len() as u64 == place.bytes() && self.sum_of(record, extent, version, bytes_of(buffer)) == wanted)
    }

    /// Returns the range of the indices of a unit's records.
    #[must_use]
    pub fn records_of(&self, unit: usize) -> Range<usize> {
        let records = &self.description.records;
        let until = |unit: usize| records.partition_point(|record| (record.unit as usize) < unit);
        until(unit)..until(unit + 1)
    }
}

impl<B: Buffer> ExtentRead<'_, B> {
    /// True if the device is done with the read, or if the extent was copied from RAM.
    #[must_use]
    pub fn is_done(&self) -> bool {
        !matches!(&self.source, Source::Storage(transfer) if !transfer.is_done())
    }

    /// Returns the number of bytes that are read from storage: the size of the extent, or 0 if the extent was copied
    /// from RAM.
    #[must_use]
    pub fn storage_bytes(&self) -> u64 {
        if matches!(self.source, Source::Storage(_)) { self.place.1 } else { 0 }
    }

    /// Waits for the device, and returns the buffer and the version of the extent. Checks the extent, unless only the
    /// RAM tier has this version.
    pub fn wait(self) -> Result<(B, u64)> {
        let Self { source, hold, extent, place } = self;
        let buffer = match source {
            Source::Storage(transfer) => {
                let buffer = transfer.wait()?;
                hold.check(extent, bytes_of(&buffer), place)?;
                buffer
            }
            Source::Memory(buffer) => {
                hold.store.check_copy(&hold, extent, bytes_of(&buffer), place)?;
                buffer
            }
        };
        Ok((buffer, hold.version))
    }
}
