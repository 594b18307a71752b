//! The roots: two pages written in turn, each naming a whole table. The newest is the truth.
//!
//! A root fills one sector, and stands in its page twice: in the first sector and in the last. A page that tore between
//! sectors still has a whole one, and so does a page with a flipped bit; a page with none was damaged in two places.

use crate::{
    checksum::{Subject, Uuid},
    features::{self, FEATURE_BYTES_MAX, LOG, RANKS},
    fields::{Fields, Malformed, Unread, push_texts},
    label::{SECTOR_BYTES, is_sealed, seal},
    layout::PAGE_BYTES,
    places::Places,
};

const MAGIC: [u8; 8] = *b"mascrt02";

/// A root.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Root {
    pub(crate) uuid: Uuid,
    /// Counts commits from 1; its lowest bit says which slot root and table are in.
    pub(crate) generation: u64,
    pub(crate) flags: u32,
    /// Flags that are not known here.
    pub(crate) other_flags: u64,
    /// The boot in which it was written, if what it names may not have been flushed.
    pub(crate) boot: [u8; 16],
    pub(crate) table_bytes: u64,
    pub(crate) table_checksum: u64,
    pub(crate) description_bytes: u64,
    pub(crate) description_checksum: u64,
    pub(crate) places: Places,
    pub(crate) log: Log,
    pub(crate) run: Run,
    pub(crate) features: Vec<String>,
}

/// The log of gradients that live slots lack; all zero without the feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Log {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Its newest head.
    pub(crate) head_offset: u64,
    pub(crate) head_checksum: u64,
}

/// Which run of several ranks it belongs to; all zero without the feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Run {
    pub(crate) id: [u8; 16],
    /// The number of this commit that all ranks share.
    pub(crate) commit: u64,
}

/// Steps were committed in memory since, and what it names may be overwritten: durability "none".
pub(crate) const UNCLOSED: u32 = 1;
/// Written without a flush: durability "close".
pub(crate) const UNFLUSHED: u32 = 2;
const FLAGS: u32 = UNCLOSED | UNFLUSHED;

impl Root {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut sector = Vec::with_capacity(PAGE_BYTES as usize);
        sector.extend(MAGIC);
        sector.extend(self.uuid);
        let mut push = |numbers: &[u64]| numbers.iter().for_each(|number| sector.extend(number.to_le_bytes()));
        push(&[self.generation, u64::from(self.flags) | self.other_flags]);
        push(&[self.table_bytes, self.table_checksum, self.description_bytes, self.description_checksum]);
        let Places { description, table, values, state, spill } = self.places;
        push(&[description, table, values, state].concat());
        push(&[spill, self.log.offset, self.log.bytes, self.log.head_offset, self.log.head_checksum]);
        push(&[self.run.commit]);
        sector.extend(self.run.id);
        sector.extend(self.boot);
        push_texts(&mut sector, &self.features);
        seal(&mut sector, &self.uuid, Subject::Root);
        let mut page = sector.clone();
        page.resize(PAGE_BYTES as usize - SECTOR_BYTES, 0);
        page.extend(sector);
        page
    }

    /// Refuses what is not known here.
    pub(crate) fn known(&self) -> Result<(), Unread> {
        features::known(&self.features)?;
        match self.other_flags {
            0 => Ok(()),
            unknown => Err(Unread::Newer(format!("flag {:#x}", 1_u64 << unknown.trailing_zeros()))),
        }
    }
}

/// The newest root of a page; `None` if none was ever written there.
pub(crate) fn read(page: &[u8], uuid: &Uuid) -> Result<Option<Root>, Malformed> {
    newest(page, |sector| decode(sector, uuid), |root| root.generation)
}

/// The newer of the two roots in a page, whatever its version.
pub(crate) fn newest<R>(
    page: &[u8],
    decode: impl Fn(&[u8]) -> Result<R, Malformed>,
    generation: impl Fn(&R) -> u64,
) -> Result<Option<R>, Malformed> {
    if page.iter().all(|&byte| byte == 0) {
        return Ok(None);
    }
    if page.len() < SECTOR_BYTES {
        return Err("it is too short".into());
    }
    let sectors = [&page[..SECTOR_BYTES], &page[page.len() - SECTOR_BYTES..]];
    let [first, last] = sectors.map(decode);
    match (first, last) {
        (Ok(first), Ok(last)) => Ok(Some(if generation(&first) >= generation(&last) { first } else { last })),
        (Ok(one), Err(_)) | (Err(_), Ok(one)) => Ok(Some(one)),
        (Err(why), Err(_)) => {
            // A page whose first write tore has a copy that is still blank.
            let blank = |sector: &[u8]| sector.iter().all(|&byte| byte == 0);
            if sectors.into_iter().any(blank) { Ok(None) } else { Err(why) }
        }
    }
}

/// A sector with these bytes as its fields.
pub(crate) fn sealed(fields: &[u8], uuid: &Uuid) -> Vec<u8> {
    let mut sector = Vec::with_capacity(SECTOR_BYTES);
    sector.extend(MAGIC);
    sector.extend(uuid);
    sector.extend(fields.iter().take(SECTOR_BYTES - 8 - sector.len()));
    seal(&mut sector, uuid, Subject::Root);
    sector
}

/// The fields of a sealed sector that begins as a root of `uuid`.
pub(crate) fn opened<'a>(sector: &'a [u8], magic: [u8; 8], uuid: &Uuid) -> Result<Fields<'a>, Malformed> {
    let mut fields = Fields::new(sector);
    if fields.array()? != magic {
        return Err("it does not begin as one".into());
    }
    if fields.array::<16>()? != *uuid {
        return Err("it belongs to another store".into());
    }
    if !is_sealed(sector, uuid, Subject::Root) {
        return Err("its checksum is wrong".into());
    }
    Ok(fields)
}

fn decode(sector: &[u8], uuid: &Uuid) -> Result<Root, Malformed> {
    let mut fields = opened(sector, MAGIC, uuid)?;
    let (generation, flags) = (fields.u64()?, fields.u64()?);
    let mut root = Root {
        uuid: *uuid,
        generation,
        flags: flags as u32 & FLAGS,
        other_flags: flags & !u64::from(FLAGS),
        table_bytes: fields.u64()?,
        table_checksum: fields.u64()?,
        description_bytes: fields.u64()?,
        description_checksum: fields.u64()?,
        ..Root::default()
    };
    let mut both = || Ok::<_, Malformed>([fields.u64()?, fields.u64()?]);
    let (description, table, values, state) = (both()?, both()?, both()?, both()?);
    root.places = Places { description, table, values, state, spill: fields.u64()? };
    root.log =
        Log { offset: fields.u64()?, bytes: fields.u64()?, head_offset: fields.u64()?, head_checksum: fields.u64()? };
    root.run = Run { commit: fields.u64()?, id: fields.array()? };
    root.boot = fields.array()?;
    root.features = fields.texts(FEATURE_BYTES_MAX)?;
    let has = |feature: &str| root.features.iter().any(|one| one == feature);
    if root.log != Log::default() && !has(LOG) || root.run != Run::default() && !has(RANKS) {
        return Err(format!("it names a log or a run, and not the feature {LOG:?} or {RANKS:?}"));
    }
    if root.generation == 0 || root.generation == u64::MAX {
        return Err(format!("generation {}", root.generation));
    }
    Ok(root)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: Uuid = [7; 16];

    fn root() -> Root {
        Root { uuid: UUID, generation: 3, features: vec![], ..Root::default() }
    }

    fn said(root: &Root) -> Result<(), String> {
        let root = read(&root.encode(), &UUID)?.ok_or("nothing there")?;
        Ok(root.known()?)
    }

    #[test]
    fn what_is_not_known_is_refused_by_its_name() {
        assert_eq!(said(&root()), Ok(()));
        let mut with_log = root();
        with_log.log.offset = 4096;
        assert!(said(&with_log).is_err_and(|why| why.contains("names a log")));
        with_log.features = vec![LOG.into()];
        assert_eq!(said(&with_log), Ok(()));
        let mut of_a_run = root();
        of_a_run.run.commit = 1;
        assert!(said(&of_a_run).is_err_and(|why| why.contains("a run")));
        of_a_run.features = vec![RANKS.into()];
        let wanted =
            "the store uses \"several ranks\", which this version of memascend does not know: install a newer one";
        assert_eq!(said(&of_a_run), Err(wanted.into()));
        let flagged = Root { flags: UNFLUSHED, other_flags: 1 << 40, ..root() };
        assert!(said(&flagged).is_err_and(|why| why.contains("uses flag 0x10000000000, which")));
    }

    #[test]
    fn every_field_comes_back() {
        let both = |first: u64| [first, first + 1];
        let full = Root {
            uuid: UUID,
            generation: 9,
            flags: UNFLUSHED,
            other_flags: 4,
            boot: [3; 16],
            table_bytes: 1,
            table_checksum: 2,
            description_bytes: 3,
            description_checksum: 4,
            places: Places { description: both(5), table: both(7), values: both(9), state: both(11), spill: 13 },
            log: Log { offset: 14, bytes: 15, head_offset: 16, head_checksum: 17 },
            run: Run { id: [18; 16], commit: 19 },
            features: vec![LOG.into(), RANKS.into()],
        };
        assert_eq!(read(&full.encode(), &UUID), Ok(Some(full)));
    }
}
