//! Reads and repairs the two copies of each label and of the description.

use std::{ops::Range, path::Path, sync::Arc};

use memascend_mem::locked;
use memascend_nvme::{Action, Volume};
use rustix::io::Errno;

use crate::{
    Description, Error, Result, Store,
    bounds::DESCRIPTION_BYTES_MAX,
    checksum::{Subject, Uuid, checksum},
    fields::{DecodeError, newer},
    label::{self, Found, Label},
    layout::PAGE_BYTES,
    open::bytes_at,
    path::refused,
    places::Devices,
    root::Root,
    store::CATALOG_CHUNK_BYTES,
};

/// A damaged or missing copy of a label or of the description.
#[derive(Debug, Clone)]
pub(crate) struct Damage {
    /// Names the copy, and says what is wrong with it.
    pub(crate) what: String,
    /// The offset in the volume at which the copy belongs; 0 if the volume was truncated and has no room for the copy.
    pub(crate) offset: u64,
    /// The correct content of the copy; empty if the volume was truncated and has no room for the copy.
    pub(crate) bytes: Vec<u8>,
}

/// Returns the uuid of the store that the devices of a volume belong to. Reads the first label of each device, and the
/// second label of a device whose first label is damaged or missing. Rejects devices that do not all belong to one
/// store, and devices in a wrong order.
pub(crate) fn read_store_uuid(volume: &Volume, devices: Devices) -> Result<Uuid> {
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
            // If the uuid of this second label differs from that of the undamaged first labels, this second label is of
            // another store, for example of a former store. The arm below then rejects the device.
            Some(Ok(Found::Label(label))) if uuid.is_none_or(|uuid| uuid == label.uuid) => {
                require_same(&label, devices, index, path, &mut uuid)?;
            }
            _ => {
                let Some(why) = why else { return refused(path, "there is no store to open: check the path") };
                return Err(Error::corrupt(path, "the label", (devices.label_offset(index), PAGE_BYTES), why));
            }
        }
    }
    uuid.ok_or_else(|| Error::Invalid("a store needs at least one device".into()))
}

/// Returns the error message for a store whose format has `version`, which this memascend cannot read.
pub(crate) fn of_version(version: u32) -> String {
    let known = label::VERSION;
    format!(
        "the store's format has version {version}, but this memascend can read only version {known}: use the memascend \
         that wrote the store, choose another path, or pass existing=\"replace\" to overwrite the store with a new one"
    )
}

/// Rejects a label whose store, device number or striping differs from `uuid`, `index` and `devices`. If `uuid` is
/// `None`, sets `uuid` to the uuid of the label.
fn require_same(label: &Label, devices: Devices, index: u32, path: &Path, uuid: &mut Option<Uuid>) -> Result<()> {
    if label.devices == devices && label.index == index && *uuid.get_or_insert(label.uuid) == label.uuid {
        return Ok(());
    }
    let (of, stripe) = (label.devices.count, label.devices.stripe_bytes);
    let why = format!(
        "it is device {} of {of} of a store with stripes of {stripe} bytes, and does not fit the other devices: pass \
         all devices of one store in their order",
        label.index + 1
    );
    refused(path, &why)
}

/// Reads the label at `offset`. The inner error says why the medium could not be read.
fn found_at(volume: &Volume, offset: u64) -> Result<std::result::Result<Found, String>> {
    Ok(readable(bytes_at(volume, offset, PAGE_BYTES))?.map(|page| label::read(&page)))
}

/// Turns a media error into an inner error with the text of the error: such an error may concern only one place of a
/// device, so the caller can try the other copy. Any other error stays an outer error.
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

/// Reads the description that a root names: its first copy or, if the first copy is damaged, its second copy.
pub(crate) fn described(volume: &Volume, root: &Root, path: &Path) -> Result<Description> {
    let mut first = None;
    for offset in root.places.description {
        let place = (offset, root.description_bytes);
        match description_at(volume, root, place)? {
            Ok(bytes) => {
                return Description::decode(&bytes).map_err(|unread| match unread {
                    DecodeError::Malformed(why) => Error::corrupt(path, "the description", place, why),
                    DecodeError::Newer(what) => Error::Refused { path: Arc::from(path), why: newer(&what) },
                });
            }
            Err(why) => {
                first.get_or_insert((place, why));
            }
        }
    }
    let (place, why) = first.unwrap_or_default();
    Err(Error::corrupt(
        path,
        "the description",
        place,
        format!("{why}, and its second copy is damaged too: restore the store from a copy"),
    ))
}

/// Reads one copy of the description. The inner error says what is wrong with the copy.
fn description_at(
    volume: &Volume,
    root: &Root,
    (offset, nbytes): (u64, u64),
) -> Result<std::result::Result<Vec<u8>, String>> {
    if nbytes > DESCRIPTION_BYTES_MAX || nbytes > volume.size_bytes().saturating_sub(offset) {
        return Ok(Err(format!("its {nbytes} bytes do not fit into the volume")));
    }
    let sum = |bytes: &[u8]| checksum(&root.uuid, Subject::Description, (0, 0), 0, bytes);
    Ok(readable(bytes_at(volume, offset, nbytes))?.and_then(|bytes| {
        if sum(&bytes) == root.description_checksum { Ok(bytes) } else { Err("its checksum is wrong".into()) }
    }))
}

impl Store {
    /// Reads every copy of the labels and of the description, and returns a message about each damaged copy. One
    /// undamaged copy of each label and of the description is enough to open the store. The first commit after an open
    /// tries to repair the copies that were damaged when the store was opened.
    pub fn damaged(&self) -> Result<Vec<String>> {
        Ok(self.damaged_copies()?.into_iter().map(|damage| damage.what).collect())
    }

    /// Returns a message about each copy that was damaged when the store was opened. Returns no messages after the
    /// first commit, which tries to repair the copies.
    #[must_use]
    pub fn noted_damage(&self) -> Vec<String> {
        let noted = locked(&self.to_repair);
        noted.iter().map(|damage| damage.what.clone()).collect()
    }

    /// Reads every copy of the labels and of the description, and returns the copies that are missing, unreadable or
    /// wrong.
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
                let what = format!("{what} is missing: the store was truncated");
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

    /// True if the volume holds `bytes` at `offset`.
    fn holds_bytes(&self, offset: u64, bytes: &[u8]) -> Result<bool> {
        for (index, extent) in (0_u64..).zip(bytes.chunks(CATALOG_CHUNK_BYTES)) {
            let at = offset + index * CATALOG_CHUNK_BYTES as u64;
            if bytes_at(&self.volume, at, extent.len() as u64)? != extent {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes the first labels of the devices whose numbers are in `of`.
    pub(crate) fn put_first_labels(&self, mut of: Range<u32>) -> Result<()> {
        let (uuid, devices) = (self.uuid, self.layout.devices);
        of.try_for_each(|index| self.put(devices.label_offset(index), &Label { uuid, index, devices }.encode()))
    }

    /// Writes the second label of each device, at the end of the volume.
    pub(crate) fn put_second_labels(&self) -> Result<()> {
        let (uuid, devices) = (self.uuid, self.layout.devices);
        for index in 0..devices.count {
            if let Some(offset) = self.layout.second_label_offset(self.volume.size_bytes(), index) {
                self.put(offset, &Label { uuid, index, devices }.encode())?;
            }
        }
        Ok(())
    }

    /// Notes the damaged copies in `to_repair`. The next commit tries to repair these copies.
    pub(crate) fn note_damaged_copies(&self) -> Result<()> {
        *locked(&self.to_repair) = self.damaged_copies()?;
        Ok(())
    }

    /// Overwrites the damaged copies in `to_repair` with their correct content. The undamaged copies are not written,
    /// so a crash here loses nothing. A copy whose write fails stays damaged: the next open notes the copy again.
    pub(crate) fn repair_copies(&self) {
        let damaged = std::mem::take(&mut *locked(&self.to_repair));
        for Damage { offset, bytes, .. } in damaged {
            drop(self.put(offset, &bytes));
        }
    }
}
