//! Computes the offsets of labels, roots and the areas that the roots name, on any number of devices.
//!
//! [Note: Rows] A row is one stripe of each device. With only one device, a row is one page. The first labels are in
//! the first row, one label at the beginning of each device. The second labels are in the last row, one label at the
//! end of each device's stripe.

use std::{
    fs::File,
    io::{Seek, SeekFrom},
    path::PathBuf,
};

use crate::{Error, Result, fields::Malformed, layout::PAGE_BYTES};

/// The limit of offsets in a volume. Sums of a few offsets below this limit do not overflow.
const STORE_BYTES_MAX: u64 = 1 << 60;

/// The number of devices and the stripe size. These two numbers determine the offsets of first labels and roots. The
/// offsets of second labels also depend on the size of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Devices {
    pub(crate) count: u32,
    pub(crate) stripe_bytes: u64,
}

impl Devices {
    /// Returns the offset in the volume of the first label of device `index`: the beginning of that device.
    pub(crate) fn label_offset(self, index: u32) -> u64 {
        u64::from(index) * self.stripe_bytes
    }

    /// Returns the offset of the page of root `slot`, 0 or 1.
    pub(crate) fn root_offset(self, slot: u64) -> u64 {
        self.row_bytes() + slot * PAGE_BYTES
    }

    /// Returns the offset of the first page after the roots.
    pub(crate) fn first_offset(self) -> u64 {
        self.row_bytes() + 2 * PAGE_BYTES
    }

    /// Returns the size of a row in bytes. See [Note: Rows].
    fn row_bytes(self) -> u64 {
        if self.count == 1 { PAGE_BYTES } else { u64::from(self.count) * self.stripe_bytes }
    }

    /// Returns the offset of the second label of device `index` in a volume of `volume_bytes`: the last page of the
    /// device's stripe in the last row. `None` if the volume has at most one row. See [Note: Rows].
    pub(crate) fn second_label_offset(self, volume_bytes: u64, index: u32) -> Option<u64> {
        let row = self.row_bytes();
        let last = (volume_bytes / row).checked_sub(1).filter(|&last| last > 0)? * row;
        Some(if self.count == 1 {
            last
        } else {
            last + u64::from(index) * self.stripe_bytes + self.stripe_bytes - PAGE_BYTES
        })
    }

    /// Returns the smallest size of a volume whose second labels are all at or after `end`. The row of the second
    /// labels may begin before `end`, because the second label of device 0 is at the end of a stripe.
    pub(crate) fn with_second_labels(self, end: u64) -> u64 {
        let row = self.row_bytes();
        let before = if self.count == 1 { 0 } else { self.stripe_bytes - PAGE_BYTES };
        (end.saturating_sub(before).div_ceil(row) + 1) * row
    }

    /// Returns the offset at which the row of the second labels begins in a volume of `volume_bytes`.
    pub(crate) fn before_second_labels(self, volume_bytes: u64) -> u64 {
        (volume_bytes / self.row_bytes()).saturating_sub(1) * self.row_bytes()
    }

    /// Returns the smallest size of a volume whose row of second labels begins at or after `end`.
    pub(crate) fn with_second_labels_after(self, end: u64) -> u64 {
        (end.div_ceil(self.row_bytes()) + 1) * self.row_bytes()
    }

    /// Returns the size of the volume that the existing files or devices at `paths` form together; 0 if any file or
    /// device is missing.
    pub(crate) fn volume_bytes(self, paths: &[PathBuf]) -> u64 {
        let length = |path: &PathBuf| File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0))).unwrap_or(0);
        let smallest = paths.iter().map(length).min().unwrap_or(0);
        let unit = self.row_bytes() / u64::from(self.count);
        smallest / unit * self.row_bytes()
    }

    /// Converts an offset in the volume to a device and an offset on this device.
    pub(crate) fn on_device(self, offset: u64) -> (u32, u64) {
        if self.count == 1 {
            return (0, offset);
        }
        let (stripe, within) = (offset / self.stripe_bytes, offset % self.stripe_bytes);
        let count = u64::from(self.count);
        ((stripe % count) as u32, stripe / count * self.stripe_bytes + within)
    }

    /// Converts an offset on a device to an offset in the volume.
    pub(crate) fn in_volume(self, device: u32, offset: u64) -> u64 {
        if self.count == 1 {
            return offset;
        }
        let (stripe, within) = (offset / self.stripe_bytes, offset % self.stripe_bytes);
        (stripe * u64::from(self.count) + u64::from(device)) * self.stripe_bytes + within
    }
}

/// The offsets of the areas that a root names. A pair has the offsets for slot 0 and for slot 1. Only the pair
/// `description` has the offsets of two copies instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Places {
    pub(crate) description: [u64; 2],
    pub(crate) table: [u64; 2],
    pub(crate) values: [u64; 2],
    pub(crate) state: [u64; 2],
    pub(crate) spill: u64,
}

/// The size in bytes of each area of [`Places`]: whole pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lengths {
    pub(crate) description: u64,
    pub(crate) table: u64,
    pub(crate) values: u64,
    pub(crate) state: u64,
    pub(crate) spill: u64,
}

impl Places {
    /// Places all areas one after the other from `first` on. The second copy of the description comes last. Also
    /// returns the end of the last area.
    pub(crate) fn in_a_row(lengths: &Lengths, first: u64) -> Result<(Self, u64)> {
        let mut end = first;
        let mut next = |bytes: u64| -> Result<u64> {
            let start = end;
            add(&mut end, bytes)?;
            Ok(start)
        };
        let description = next(lengths.description)?;
        let places = Self {
            table: [next(lengths.table)?, next(lengths.table)?],
            values: [next(lengths.values)?, next(lengths.values)?],
            state: [next(lengths.state)?, next(lengths.state)?],
            spill: next(lengths.spill)?,
            description: [description, next(lengths.description)?],
        };
        Ok((places, end))
    }

    /// Returns the offset and the size in bytes of every area.
    fn extents(&self, lengths: &Lengths) -> Vec<(u64, u64)> {
        let pairs = [
            (self.description, lengths.description),
            (self.table, lengths.table),
            (self.values, lengths.values),
            (self.state, lengths.state),
        ];
        let both = pairs.into_iter().flat_map(|(at, bytes)| at.map(|at| (at, bytes)));
        both.chain([(self.spill, lengths.spill)]).collect()
    }

    /// Returns the end of the last area. Fails if an area is not aligned to a page or ends past the limit of offsets,
    /// or if an area that is not empty begins before `first` or overlaps another area.
    pub(crate) fn end(&self, lengths: &Lengths, first: u64) -> std::result::Result<u64, Malformed> {
        let mut extents = self.extents(lengths);
        extents.sort_unstable();
        let mut end = first;
        for (at, bytes) in extents {
            let after = at.checked_add(bytes).filter(|&after| after < STORE_BYTES_MAX);
            match after {
                Some(after) if at.is_multiple_of(PAGE_BYTES) && (at >= end || bytes == 0) => end = end.max(after),
                _ => return Err(format!("{bytes} bytes at {at} begin before {end}, end too late or are unaligned")),
            }
        }
        Ok(end)
    }
}

/// Rounds a number of bytes up to whole pages.
pub(crate) fn paged(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE_BYTES)
}

/// Adds `bytes` to `sum`; fails if the sum reaches the limit of offsets.
pub(crate) fn add(sum: &mut u64, bytes: u64) -> Result<()> {
    *sum = sum.checked_add(bytes).filter(|&sum| sum < STORE_BYTES_MAX).ok_or_else(too_large)?;
    Ok(())
}

pub(crate) fn too_large() -> Error {
    Error::Invalid("the store would have too many bytes or extents: describe fewer or smaller records".into())
}
