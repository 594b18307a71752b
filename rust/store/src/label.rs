//! Labels each device with the uuid of the store, and with the number of the device among the store's devices.
//!
//! Each device has two copies of its label: one page at the beginning and one at the end.

use crate::{
    checksum::{Subject, Uuid, checksum},
    fields::{Fields, Malformed},
    layout::PAGE_BYTES,
    places::Devices,
};

/// The first bytes of a label.
pub(crate) const MAGIC: [u8; 8] = *b"memascnd";
/// The version of the whole format; see `docs/store-format.md`.
pub(crate) const VERSION: u32 = 2;
/// Bytes of a sector. A device writes a sector whole or not at all.
pub(crate) const SECTOR_BYTES: usize = 512;

/// The label of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Label {
    pub(crate) uuid: Uuid,
    /// The device's number among the store's devices.
    pub(crate) index: u32,
    pub(crate) devices: Devices,
}

/// The content of a page where a label belongs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found {
    Label(Label),
    /// Zeros only.
    Blank,
    /// Bytes that do not begin with [`MAGIC`], or fewer bytes than a sector.
    Foreign,
    /// A label whose version of the format is not [`VERSION`].
    Version(u32),
    /// A label with a wrong checksum or impossible fields, or an unreadable page; the string gives the reason.
    Damaged(Malformed),
}

impl Label {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(PAGE_BYTES as usize);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.index.to_le_bytes());
        bytes.extend(self.devices.count.to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(self.devices.stripe_bytes.to_le_bytes());
        bytes.extend(self.uuid);
        seal(&mut bytes, &self.uuid, Subject::Label);
        bytes.resize(PAGE_BYTES as usize, 0);
        bytes
    }
}

/// Pads `bytes` with zeros to a sector, and sets the sector's last eight bytes to the checksum of all bytes before the
/// last eight.
pub(crate) fn seal(bytes: &mut Vec<u8>, uuid: &Uuid, subject: Subject) {
    bytes.resize(SECTOR_BYTES - 8, 0);
    let sum = checksum(uuid, subject, (0, 0), 0, bytes);
    bytes.extend(sum.to_le_bytes());
}

/// True if the last eight bytes of a sector are the checksum of all bytes before the last eight.
pub(crate) fn is_sealed(sector: &[u8], uuid: &Uuid, subject: Subject) -> bool {
    let (bytes, sum) = sector.split_at(SECTOR_BYTES - 8);
    checksum(uuid, subject, (0, 0), 0, bytes).to_le_bytes() == sum
}

/// Parses a page where a label belongs.
pub(crate) fn read(bytes: &[u8]) -> Found {
    let Some(sector) = bytes.get(..SECTOR_BYTES) else { return Found::Foreign };
    if !sector.starts_with(&MAGIC) {
        return if bytes.iter().all(|&byte| byte == 0) { Found::Blank } else { Found::Foreign };
    }
    decode(sector).unwrap_or_else(Found::Damaged)
}

fn decode(sector: &[u8]) -> Result<Found, Malformed> {
    let mut fields = Fields::new(&sector[MAGIC.len()..]);
    let version = fields.u32()?;
    let index = fields.u32()?;
    let count = fields.u32()?;
    fields.u32()?;
    let stripe_bytes = fields.u64()?;
    let uuid = fields.array()?;
    if !is_sealed(sector, &uuid, Subject::Label) {
        return Err("its checksum is wrong".into());
    }
    if version != VERSION {
        return Ok(Found::Version(version));
    }
    let stripe_is_whole = stripe_bytes.is_multiple_of(PAGE_BYTES) && (PAGE_BYTES..=1 << 30).contains(&stripe_bytes);
    let devices_max = memascend_nvme::DEVICES_MAX as u32;
    if count == 0 || count > devices_max || index >= count || !stripe_is_whole {
        return Err(format!("it names the impossible device {index} of {count} with stripes of {stripe_bytes} bytes"));
    }
    let label = Label { uuid, index, devices: Devices { count, stripe_bytes } };
    Ok(Found::Label(label))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_of_another_version_is_read_as_that_version() {
        let uuid = [7; 16];
        let label = Label { uuid, index: 0, devices: Devices { count: 1, stripe_bytes: PAGE_BYTES } };
        for (version, expected) in
            [(0, Found::Version(0)), (1, Found::Version(1)), (VERSION, Found::Label(label)), (3, Found::Version(3))]
        {
            let mut sector = label.encode()[..SECTOR_BYTES - 8].to_vec();
            sector[8..12].copy_from_slice(&version.to_le_bytes());
            seal(&mut sector, &uuid, Subject::Label);
            assert_eq!(read(&sector), expected);
        }
        let mut sector = label.encode();
        sector[8] = 3;
        assert!(matches!(read(&sector), Found::Damaged(_)), "the version was changed without the checksum");
    }
}
