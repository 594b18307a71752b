//! Reads and repairs the two copies of each label and of the description.

use std::{ops::Range, path::Path, sync::Arc};

use memascend_mem::locked;
use memascend_nvme::{Action, Volume};
use rustix::io::Errno;

use crate::{
    Description, Error, Result, Store,
    bounds::DESCRIPTION_BYTES_MAX,
    checksum::{Subject, Uuid, checksum},
    fields::{Unread, newer},
    label::{self, Found, Label},
    layout::PAGE_BYTES,
    open::bytes_at,
    path::refused,
    places::Devices,
    root::Root,
    store::CATALOG_CHUNK_BYTES,
};

/// A copy that is not what it should be, while the other one is.
#[derive(Debug, Clone)]
pub(crate) struct Damage {
    /// Which copy of what, and what is wrong with it.
    pub(crate) what: String,
    pub(crate) offset: u64,
    /// What belongs there; nothing where there is no room for it.
    pub(crate) bytes: Vec<u8>,
}

/// Whose the devices of a volume are, by their first labels, and by the second one where the first is damaged.
pub(crate) fn labelled(volume: &Volume, devices: Devices) -> Result<Uuid> {
    let mut uuid = None;
    let mut damaged = Vec::new();
    for index in 0..devices.count {
        let path = &volume.devices()[index as usize].path;
        match found_at(volume, devices.label_offset(index))? {
            Ok(Found::Label(label)) => require_same(&label, devices, index, path, &mut uuid)?,
            Ok(Found::Version(version)) => return refused(path, &of_version(version)),
            Ok(Found::Blank | Found::Foreign) => damaged.push((index, None)),
            Ok(Found::Damaged(why)) | Err(why) => damaged.push((index, Some(why))),
        }
    }
    for (index, why) in damaged {
        let path = &volume.devices()[index as usize].path;
        let second = devices.second_label_offset(volume.size_bytes(), index).map(|at| found_at(volume, at));
        match second.transpose()? {
            // One of another store was left there by whoever had the device before.
            Some(Ok(Found::Label(label))) if uuid.is_none_or(|uuid| uuid == label.uuid) => {
                require_same(&label, devices, index, path, &mut uuid)?;
            }
            _ => {
                let Some(why) = why else { return refused(path, "there is no store") };
                return Err(Error::corrupt(path, "the label", (devices.label_offset(index), PAGE_BYTES), why));
            }
        }
    }
    uuid.ok_or_else(|| Error::Invalid("a store needs at least one device".into()))
}

/// The message about a store of another version of the format.
pub(crate) fn of_version(version: u32) -> String {
    let known = label::VERSION;
    format!(
        "the store's format has version {version}, and this memascend reads version {known} alone: use the memascend \
         that wrote it, choose another path, or give existing=\"replace\" to begin anew"
    )
}

fn require_same(label: &Label, devices: Devices, index: u32, path: &Path, uuid: &mut Option<Uuid>) -> Result<()> {
    if label.devices == devices && label.index == index && *uuid.get_or_insert(label.uuid) == label.uuid {
        return Ok(());
    }
    let (of, stripe) = (label.devices.count, label.devices.stripe_bytes);
    let why = format!("it is device {} of {of} of a store with stripes of {stripe} bytes", label.index + 1);
    refused(path, &why)
}

/// The label in a page, or why the device does not give the page.
fn found_at(volume: &Volume, offset: u64) -> Result<std::result::Result<Found, String>> {
    Ok(readable(bytes_at(volume, offset, PAGE_BYTES))?.map(|page| label::read(&page)))
}

/// Tells a place that a device cannot read from a device that does not answer.
fn readable<T>(read: Result<T>) -> Result<std::result::Result<T, String>> {
    const MEDIUM: [Errno; 4] = [Errno::IO, Errno::NODATA, Errno::ILSEQ, Errno::REMOTEIO];
    match read {
        Ok(read) => Ok(Ok(read)),
        Err(Error::Storage(memascend_nvme::Error::Device { action: Action::Read, errno, .. }))
            if MEDIUM.contains(&Errno::from_raw_os_error(errno)) =>
        {
            Ok(Err(format!("it cannot be read: {}", std::io::Error::from_raw_os_error(errno))))
        }
        Err(error) => Err(error),
    }
}

/// The description that a root names, from its first copy or from the second.
pub(crate) fn described(volume: &Volume, root: &Root, path: &Path) -> Result<Description> {
    let mut first = None;
    for offset in root.places.description {
        let place = (offset, root.description_bytes);
        match description_at(volume, root, place)? {
            Ok(bytes) => {
                return Description::decode(&bytes).map_err(|unread| match unread {
                    Unread::Malformed(why) => Error::corrupt(path, "the description", place, why),
                    Unread::Newer(what) => Error::Refused { path: Arc::from(path), why: newer(&what) },
                });
            }
            Err(why) => {
                first.get_or_insert((place, why));
            }
        }
    }
    let (place, why) = first.unwrap_or_default();
    Err(Error::corrupt(path, "the description", place, format!("{why}, and its second copy is damaged too")))
}

fn description_at(
    volume: &Volume,
    root: &Root,
    (offset, nbytes): (u64, u64),
) -> Result<std::result::Result<Vec<u8>, String>> {
    if nbytes > DESCRIPTION_BYTES_MAX || nbytes > volume.size_bytes().saturating_sub(offset) {
        return Ok(Err(format!("{nbytes} bytes of it are not there")));
    }
    let sum = |bytes: &[u8]| checksum(&root.uuid, Subject::Description, (0, 0), 0, bytes);
    Ok(readable(bytes_at(volume, offset, nbytes))?.and_then(|bytes| {
        if sum(&bytes) == root.description_checksum { Ok(bytes) } else { Err("its checksum is wrong".into()) }
    }))
}

impl Store {
    /// Which copies of labels and of the description are damaged, and how, in words. The other copy of each is whole,
    /// and the next commit after an open repairs them.
    pub fn damaged(&self) -> Result<Vec<String>> {
        Ok(self.damaged_copies()?.into_iter().map(|damage| damage.what).collect())
    }

    /// The same, as it was when the store was opened; nothing after a commit.
    #[must_use]
    pub fn noted_damage(&self) -> Vec<String> {
        let noted = locked(&self.to_repair);
        noted.iter().map(|damage| damage.what.clone()).collect()
    }

    /// Every copy of a label or of the description that is not what it should be.
    pub(crate) fn damaged_copies(&self) -> Result<Vec<Damage>> {
        let (devices, size) = (self.layout.devices, self.volume.size_bytes());
        let mut copies = Vec::new();
        for index in 0..devices.count {
            let label = Label { uuid: self.uuid, index, devices }.encode();
            let path = self.volume.devices()[index as usize].path.display();
            copies.push((format!("the first label of {path}"), Some(devices.label_offset(index)), label.clone()));
            let second = self.layout.second_label_offset(size, index);
            copies.push((format!("the second label of {path}"), second, label));
        }
        let mut description = self.description.encode();
        description.resize(description.len().next_multiple_of(PAGE_BYTES as usize), 0);
        for (which, offset) in ["first", "second"].into_iter().zip(self.layout.places.description) {
            copies.push((format!("the {which} copy of the description"), Some(offset), description.clone()));
        }
        let mut damaged = Vec::new();
        for (what, offset, bytes) in copies {
            let Some(offset) = offset else {
                let what = format!("{what} has no room: the store was truncated");
                damaged.push(Damage { what, offset: 0, bytes: Vec::new() });
                continue;
            };
            let why = match readable(self.holds_bytes(offset, &bytes))? {
                Ok(true) => continue,
                Ok(false) => "is damaged".to_owned(),
                Err(why) => format!("is damaged: {why}"),
            };
            damaged.push(Damage { what: format!("{what}, at offset {offset}, {why}"), offset, bytes });
        }
        Ok(damaged)
    }

    fn holds_bytes(&self, offset: u64, bytes: &[u8]) -> Result<bool> {
        for (index, extent) in (0_u64..).zip(bytes.chunks(CATALOG_CHUNK_BYTES)) {
            let at = offset + index * CATALOG_CHUNK_BYTES as u64;
            if bytes_at(&self.volume, at, extent.len() as u64)? != extent {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes the first labels of some of the devices.
    pub(crate) fn put_first_labels(&self, mut of: Range<u32>) -> Result<()> {
        let (uuid, devices) = (self.uuid, self.layout.devices);
        of.try_for_each(|index| self.put(devices.label_offset(index), &Label { uuid, index, devices }.encode()))
    }

    pub(crate) fn put_second_labels(&self) -> Result<()> {
        let (uuid, devices) = (self.uuid, self.layout.devices);
        for index in 0..devices.count {
            if let Some(offset) = self.layout.second_label_offset(self.volume.size_bytes(), index) {
                self.put(offset, &Label { uuid, index, devices }.encode())?;
            }
        }
        Ok(())
    }

    /// Notes what is damaged, for the next commit to repair.
    pub(crate) fn note_damaged_copies(&self) -> Result<()> {
        *locked(&self.to_repair) = self.damaged_copies()?;
        Ok(())
    }

    /// Writes what damaged copies should hold. The whole copy of each stays as it is, so nothing can be lost; what
    /// cannot be written stays damaged, and is not tried again before the store is opened again.
    pub(crate) fn repair_copies(&self) {
        let damaged = std::mem::take(&mut *locked(&self.to_repair));
        for Damage { offset, bytes, .. } in damaged {
            drop(self.put(offset, &bytes));
        }
    }
}
