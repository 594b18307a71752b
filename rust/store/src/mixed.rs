//! Rejects a striped store whose devices hold copies of different commits. Checks a sample of the extents on each
//! device.
//!
//! A root and its table may be on few of the devices, but the table has the checksums of the extents on all devices.
//! Each read of an extent checks the extent's checksum, so training never computes with a mix of copies. But without
//! the sample, the first read of a wrong extent might come hours after the store was opened.

use std::cmp::Reverse;

use crate::{Error, Result, Scratch, Store, path::refused};

/// The number of extents to sample on each device.
const SAMPLES: usize = 16;

/// Counts the extents that were sampled on one device.
#[derive(Debug, Clone, Copy, Default)]
struct Sampled {
    extents: usize,
    /// The number of sampled extents whose checksum differs from the checksum in the table.
    others: usize,
}

impl Store {
    /// Rejects a store on several devices if the checksum of a sampled extent is wrong: the extent belongs to another
    /// commit or is damaged.
    pub(crate) fn require_one_commit(&self) -> Result<()> {
        let devices = self.layout.devices;
        if devices.count == 1 {
            return Ok(());
        }
        let (state, values) = self.description.staging_bytes();
        let scratch = Scratch::new(state.max(values).max(1) as usize, 1, "a sample of each device")?;
        let mut sampled = vec![Sampled::default(); devices.count as usize];
        let mut first = None;
        for (record, extent) in self.telling_extents() {
            if sampled.iter().all(|device| device.extents >= SAMPLES) {
                break;
            }
            let holders = self.holders(record, extent);
            if holders.iter().all(|&device| sampled[device].extents >= SAMPLES) {
                continue;
            }
            let bytes = self.layout.extent(&self.description, record, extent).bytes();
            let found = match self.read_slot(record, extent, scratch.part(bytes)?)?.wait() {
                Ok(_) => None,
                Err(error @ Error::Corrupt { .. }) => Some(error),
                // The sample skips an extent that a device fails to read: a later read of the extent reports the error.
                Err(Error::Storage(_)) => continue,
                Err(error) => return Err(error),
            };
            for device in holders {
                sampled[device].extents += 1;
                sampled[device].others += usize::from(found.is_some());
            }
            first = first.or(found);
        }
        first.map_or(Ok(()), |error| self.reject_mixed(&sampled, error))
    }

    /// Returns every live extent in the order of sampling: the first extent of each record, then the second extent of
    /// each record, and so on. Each round takes the records by their versions: the newest, the oldest, the second
    /// newest, the second oldest, and so on.
    ///
    /// This order finds a wrong copy early. An older copy of a device does not have the extents with the newest
    /// versions. In a newer copy, or in a copy from another continuation of the run, the extents with the oldest
    /// versions were overwritten first: the RAM tier writes one record after the other, each once in many steps.
    fn telling_extents(&self) -> impl Iterator<Item = (usize, u32)> {
        let count = self.description.records.len();
        let mut records: Vec<usize> = (0..count).filter(|&record| self.layout.extents_of(record) > 0).collect();
        {
            let index = self.index.lock();
            records.sort_by_key(|&record| {
                let slots = &index.records[record];
                Reverse(slots.versions[usize::from(slots.live)])
            });
        }
        let count = records.len();
        let turns: Vec<usize> =
            (0..count).map(|turn| records[if turn % 2 == 0 { turn / 2 } else { count - 1 - turn / 2 }]).collect();
        let rounds = turns.iter().map(|&record| self.layout.extents_of(record)).max().unwrap_or(0);
        (0..rounds).flat_map(move |extent| {
            let has = move |record: &usize| extent < self.layout.extents_of(*record);
            turns.clone().into_iter().filter(has).map(move |record| (record, extent))
        })
    }

    /// Returns the indexes of the devices that store a part of a live extent.
    fn holders(&self, record: usize, extent: u32) -> Vec<usize> {
        let (devices, place) = (self.layout.devices, self.layout.extent(&self.description, record, extent));
        let slot = usize::from(self.index.lock().records[record].live);
        let (first, bytes) = (self.layout.offset(&place, slot), place.bytes());
        let stripes = first / devices.stripe_bytes..(first + bytes).div_ceil(devices.stripe_bytes);
        let mut holders: Vec<usize> =
            stripes.take(devices.count as usize).map(|stripe| (stripe % u64::from(devices.count)) as usize).collect();
        holders.sort_unstable();
        holders
    }

    /// Returns an error that names the devices whose sampled extents were all wrong. If there is no device of this
    /// kind, returns `error`, which is about the first wrong extent, with a hint that copies may be mixed.
    fn reject_mixed(&self, sampled: &[Sampled], error: Error) -> Result<()> {
        let is_other = |device: &Sampled| device.extents > 0 && device.others == device.extents;
        let parts = sampled.iter().zip(self.volume.devices()).filter(|(device, _)| is_other(device));
        let others: Vec<String> = parts.map(|(_, device)| device.path.display().to_string()).collect();
        if others.is_empty() {
            return Err(error.adding("; or the store's devices hold copies of different commits"));
        }
        let step = self.index.lock().step;
        let why = format!(
            "its {} files or devices are not of one commit: no extent that was sampled on {} belongs to step {step}, \
             the store's last step. The files or devices were copied at different times or in different \
             continuations of the run, or are damaged: restore copies of all of them that were made at the same time",
            sampled.len(),
            others.join(" and "),
        );
        refused(&self.path, &why)
    }
}
