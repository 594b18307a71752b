//! The roots: two pages written in turn, each of which names a whole table. The newest is the truth.
//!
//! A root fills one sector, and stands in its page twice: in the first sector and in the last. A page that tore between
//! sectors still has a whole one, and so does a page with a flipped bit; a page with none was damaged in two places.

use crate::{
    checksum::{Subject, Uuid},
    fields::{Fields, Malformed},
    label::{SECTOR_BYTES, is_sealed, seal},
    layout::PAGE_BYTES,
};

const MAGIC: [u8; 8] = *b"mascroot";

/// A root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Root {
    pub(crate) uuid: Uuid,
    /// Counts commits from 1; its lowest bit says which slot root and table are in.
    pub(crate) generation: u64,
    pub(crate) table_bytes: u64,
    pub(crate) table_checksum: u64,
    pub(crate) description_bytes: u64,
    pub(crate) description_checksum: u64,
    pub(crate) flags: u32,
    /// The boot in which it was written, if what it names may not have been flushed.
    pub(crate) boot: [u8; 16],
}

/// Steps were committed in memory since, and what it names may be overwritten: durability "none".
pub(crate) const UNCLOSED: u32 = 1;
/// Written without a flush: durability "close".
pub(crate) const UNFLUSHED: u32 = 2;

impl Root {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut sector = Vec::with_capacity(PAGE_BYTES as usize);
        sector.extend(MAGIC);
        sector.extend(self.uuid);
        for number in [
            self.generation,
            self.table_bytes,
            self.table_checksum,
            self.description_bytes,
            self.description_checksum,
            u64::from(self.flags),
        ] {
            sector.extend(number.to_le_bytes());
        }
        sector.extend(self.boot);
        seal(&mut sector, &self.uuid, Subject::Root);
        let mut page = sector.clone();
        page.resize(PAGE_BYTES as usize - SECTOR_BYTES, 0);
        page.extend(sector);
        page
    }
}

/// The newest root of a page; `None` if none was ever written there.
pub(crate) fn read(page: &[u8], uuid: &Uuid) -> Result<Option<Root>, Malformed> {
    if page.iter().all(|&byte| byte == 0) {
        return Ok(None);
    }
    if page.len() < SECTOR_BYTES {
        return Err("it is too short".into());
    }
    let sectors = [&page[..SECTOR_BYTES], &page[page.len() - SECTOR_BYTES..]];
    let [first, last] = sectors.map(|sector| decode(sector, uuid));
    match (first, last) {
        (Ok(first), Ok(last)) => Ok(Some(if first.generation >= last.generation { first } else { last })),
        (Ok(one), Err(_)) | (Err(_), Ok(one)) => Ok(Some(one)),
        (Err(why), Err(_)) => {
            // A page whose first write tore has a copy that is still blank.
            let blank = |sector: &[u8]| sector.iter().all(|&byte| byte == 0);
            if sectors.into_iter().any(blank) { Ok(None) } else { Err(why) }
        }
    }
}

fn decode(sector: &[u8], uuid: &Uuid) -> Result<Root, Malformed> {
    let mut fields = Fields::new(sector);
    if fields.array()? != MAGIC {
        return Err("it does not begin as one".into());
    }
    let found: Uuid = fields.array()?;
    if found != *uuid {
        return Err("it belongs to another store".into());
    }
    if !is_sealed(sector, uuid, Subject::Root) {
        return Err("its checksum is wrong".into());
    }
    let root = Root {
        uuid: found,
        generation: fields.u64()?,
        table_bytes: fields.u64()?,
        table_checksum: fields.u64()?,
        description_bytes: fields.u64()?,
        description_checksum: fields.u64()?,
        flags: u32::try_from(fields.u64()?).map_err(|_| "unknown flags".to_owned())?,
        boot: fields.array()?,
    };
    if root.generation == 0 || root.generation == u64::MAX || root.flags & !(UNCLOSED | UNFLUSHED) != 0 {
        return Err(format!("generation {} with flags {:#x}", root.generation, root.flags));
    }
    Ok(root)
}
