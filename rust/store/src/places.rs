//! Computes where labels, roots and what the roots name lie, on any number of devices.

use std::{
    fs::File,
    io::{Seek, SeekFrom},
    path::PathBuf,
};

use crate::{Error, Result, fields::Malformed, layout::PAGE_BYTES};

/// No volume is larger; leaves room for sums.
const STORE_BYTES_MAX: u64 = 1 << 60;

/// The devices below, as far as placement depends on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Devices {
    pub(crate) count: u32,
    pub(crate) stripe_bytes: u64,
}

impl Devices {
    /// Where the label of device `index` lies: at the beginning of that device.
    pub(crate) fn label_offset(self, index: u32) -> u64 {
        u64::from(index) * self.stripe_bytes
    }

    /// Where root `slot` lies.
    pub(crate) fn root_offset(self, slot: u64) -> u64 {
        self.row_bytes() + slot * PAGE_BYTES
    }

    /// Where what follows the roots begins.
    pub(crate) fn first_offset(self) -> u64 {
        self.row_bytes() + 2 * PAGE_BYTES
    }

    /// Bytes of the volume that are one stripe of each device: what the labels take, too.
    fn row_bytes(self) -> u64 {
        if self.count == 1 { PAGE_BYTES } else { u64::from(self.count) * self.stripe_bytes }
    }

    /// Where the second label of device `index` lies in a volume of so many bytes: in the last page of its last stripe.
    /// `None` where there is no room for one.
    pub(crate) fn second_label_offset(self, volume_bytes: u64, index: u32) -> Option<u64> {
        let row = self.row_bytes();
        let last = (volume_bytes / row).checked_sub(1).filter(|&last| last > 0)? * row;
        Some(if self.count == 1 {
            last
        } else {
            last + u64::from(index) * self.stripe_bytes + self.stripe_bytes - PAGE_BYTES
        })
    }

    /// Bytes of a volume that holds what ends at `end`, and the second labels after that.
    pub(crate) fn with_second_labels(self, end: u64) -> u64 {
        let row = self.row_bytes();
        let before = if self.count == 1 { 0 } else { self.stripe_bytes - PAGE_BYTES };
        (end.saturating_sub(before).div_ceil(row) + 1) * row
    }

    /// What a volume of so many bytes holds before its second labels.
    pub(crate) fn before_second_labels(self, volume_bytes: u64) -> u64 {
        (volume_bytes / self.row_bytes()).saturating_sub(1) * self.row_bytes()
    }

    /// Bytes of a volume that holds so many before its second labels.
    pub(crate) fn with_second_labels_after(self, end: u64) -> u64 {
        (end.div_ceil(self.row_bytes()) + 1) * self.row_bytes()
    }

    /// Bytes of the volume that existing files and devices make, none where one of them is not there.
    pub(crate) fn volume_bytes(self, paths: &[PathBuf]) -> u64 {
        let length = |path: &PathBuf| File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0))).unwrap_or(0);
        let smallest = paths.iter().map(length).min().unwrap_or(0);
        let unit = self.row_bytes() / u64::from(self.count);
        smallest / unit * self.row_bytes()
    }

    /// Where a place of the volume is: which device, and where on it.
    pub(crate) fn on_device(self, offset: u64) -> (u32, u64) {
        if self.count == 1 {
            return (0, offset);
        }
        let (stripe, within) = (offset / self.stripe_bytes, offset % self.stripe_bytes);
        let count = u64::from(self.count);
        ((stripe % count) as u32, stripe / count * self.stripe_bytes + within)
    }

    /// Where a place of a device is in the volume.
    pub(crate) fn in_volume(self, device: u32, offset: u64) -> u64 {
        if self.count == 1 {
            return offset;
        }
        let (stripe, within) = (offset / self.stripe_bytes, offset % self.stripe_bytes);
        (stripe * u64::from(self.count) + u64::from(device)) * self.stripe_bytes + within
    }
}

/// Where each thing begins whose place the root names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Places {
    pub(crate) description: [u64; 2],
    pub(crate) table: [u64; 2],
    pub(crate) values: [u64; 2],
    pub(crate) state: [u64; 2],
    pub(crate) spill: u64,
}

/// How long each of these is, in whole pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lengths {
    pub(crate) description: u64,
    pub(crate) table: u64,
    pub(crate) values: u64,
    pub(crate) state: u64,
    pub(crate) spill: u64,
}

impl Places {
    /// One after the other from `first` on, the description's second copy at the end; and where that ends.
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

    /// Every extent: where it begins, and its bytes.
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

    /// Where the last extent ends; an error where they do not lie side by side behind the roots.
    pub(crate) fn end(&self, lengths: &Lengths, first: u64) -> std::result::Result<u64, Malformed> {
        let mut extents = self.extents(lengths);
        extents.sort_unstable();
        let mut end = first;
        for (at, bytes) in extents {
            let after = at.checked_add(bytes).filter(|&after| after < STORE_BYTES_MAX);
            match after {
                Some(after) if at.is_multiple_of(PAGE_BYTES) && (at >= end || bytes == 0) => end = end.max(after),
                _ => return Err(format!("{bytes} bytes at offset {at} lie over what ends at {end}, or past all ends")),
            }
        }
        Ok(end)
    }
}

pub(crate) fn paged(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE_BYTES)
}

pub(crate) fn add(sum: &mut u64, bytes: u64) -> Result<()> {
    *sum = sum.checked_add(bytes).filter(|&sum| sum < STORE_BYTES_MAX).ok_or_else(too_large)?;
    Ok(())
}

pub(crate) fn too_large() -> Error {
    Error::Invalid("the description asks for more than a volume can hold".into())
}
