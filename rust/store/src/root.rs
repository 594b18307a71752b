//! Encodes and decodes roots, the pages that make commits valid. A store has two root pages, and commits write them
//! alternately. Each root names a whole table. The newest root counts, unless the caller asks for the previous commit.
//!
//! [Note: Root pages] A root fills one sector and is stored twice in its page: in the first sector and in the last
//! sector. A page that was torn between sectors, or that has one flipped bit, still has a whole root. If both copies of
//! a root are damaged, the page was damaged in two places. A page that holds no root has a mark instead. Each root
//! records what the other page held (`Root::beside`). So if one page has a root and the other page has only zeros, the
//! content of the page with zeros was lost. This content may have been the newest root.

use crate::{
    checksum::{Subject, Uuid},
    features::{self, FEATURE_BYTES_MAX, IDENTITY, LOG, RANKS},
    fields::{DecodeError, Fields, Malformed, push_texts},
    label::{SECTOR_BYTES, is_sealed, seal},
    layout::PAGE_BYTES,
    places::Places,
};

const MAGIC: [u8; 8] = *b"mascrt02";
const MAGIC_OF_MARK: [u8; 8] = *b"mascnone";
/// Offset of `beside` in a sector.
const BESIDE_AT: usize = SECTOR_BYTES - 16;
/// Offset of the commit's identity, rank and number of ranks. The list of features has a variable length and ends
/// before this offset.
const IDENTITY_AT: usize = BESIDE_AT - 24;

/// The fields of a root. A root makes a commit valid. `docs/store-format.md` describes each field.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Root {
    pub(crate) uuid: Uuid,
    /// The number of the commit, from 1. Root and table are in slot `generation & 1`.
    pub(crate) generation: u64,
    /// True if later commits in memory may overwrite the extents that this root names, as they do with durability
    /// "none".
    pub(crate) is_unclosed: bool,
    /// Flags that this version does not know.
    pub(crate) other_flags: u64,
    pub(crate) table_bytes: u64,
    pub(crate) table_checksum: u64,
    pub(crate) description_bytes: u64,
    pub(crate) description_checksum: u64,
    pub(crate) places: Places,
    pub(crate) log: LogFields,
    pub(crate) run: Run,
    pub(crate) features: Vec<String>,
    /// The content of the other root page when this root was written.
    pub(crate) beside: Beside,
}

/// The content of the other root page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Beside {
    /// A mark, which states that the page holds no root.
    #[default]
    Mark,
    /// A root. The value is the generation of this root.
    Root(u64),
}

/// The content of a root page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found {
    /// Zeros, an incomplete first write, or a page of another store.
    Blank,
    Mark,
    Root(Box<Root>),
}

/// The place of the gradient log. All fields are zero if the root does not list the feature [`LOG`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct LogFields {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Offset and checksum of the newest head.
    pub(crate) head_offset: u64,
    pub(crate) head_checksum: u64,
}

/// The run to which a commit belongs, and the rank of the store, if the run has several ranks. All fields are zero if
/// the commit does not belong to a run of several ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Run {
    /// The id of the run, equal in the stores of all ranks.
    pub id: [u8; 16],
    /// The number of the commit, equal on all ranks. The generation of the commit can differ from rank to rank.
    pub commit: u64,
    /// The identity of the commit, equal on all ranks. A commit with the same number in another continuation of the run
    /// has another identity.
    pub identity: [u8; 16],
    /// The rank that owns the store. The store has the rows of shard `rank % ranks`.
    pub rank: u32,
    /// The number of ranks over which the rows are sharded: all ranks, or the ranks of one replica.
    pub ranks: u32,
}

/// The flag for [`Root::is_unclosed`].
const UNCLOSED: u64 = 1;
/// Bytes of zeros before the features, reserved for later versions.
const RESERVED_BYTES: usize = 16;

impl Root {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut sector = Vec::with_capacity(PAGE_BYTES as usize);
        sector.extend(MAGIC);
        sector.extend(self.uuid);
        let mut push = |numbers: &[u64]| numbers.iter().for_each(|number| sector.extend(number.to_le_bytes()));
        push(&[self.generation, (u64::from(self.is_unclosed) * UNCLOSED) | self.other_flags]);
        push(&[self.table_bytes, self.table_checksum, self.description_bytes, self.description_checksum]);
        let Places { description, table, values, state, spill } = self.places;
        push(&[description, table, values, state].concat());
        push(&[spill, self.log.offset, self.log.bytes, self.log.head_offset, self.log.head_checksum]);
        push(&[self.run.commit]);
        sector.extend(self.run.id);
        sector.extend([0; RESERVED_BYTES]);
        push_texts(&mut sector, &self.features);
        sector.resize(IDENTITY_AT, 0);
        sector.extend(self.run.identity);
        sector.extend(self.run.rank.to_le_bytes());
        sector.extend(self.run.ranks.to_le_bytes());
        sector.extend(self.beside.number().to_le_bytes());
        twice(sector, &self.uuid)
    }

    /// Fails if the root has a feature or a flag that this version does not know.
    pub(crate) fn known(&self) -> Result<(), DecodeError> {
        features::known(&self.features)?;
        match self.other_flags {
            0 => Ok(()),
            unknown => Err(DecodeError::Newer(format!("flag {:#x}", 1_u64 << unknown.trailing_zeros()))),
        }
    }
}

impl Beside {
    fn number(self) -> u64 {
        match self {
            Self::Mark => u64::MAX,
            Self::Root(generation) => generation,
        }
    }

    fn of(number: u64) -> Result<Self, Malformed> {
        match number {
            0 => Err("it does not say what the page of the other root holds".into()),
            u64::MAX => Ok(Self::Mark),
            generation => Ok(Self::Root(generation)),
        }
    }
}

/// Encodes a page with a mark, which states that the page holds no root.
pub(crate) fn mark(uuid: &Uuid) -> Vec<u8> {
    twice([&MAGIC_OF_MARK[..], uuid].concat(), uuid)
}

/// Seals a sector. Returns a page whose first sector and last sector are both this sector.
fn twice(mut sector: Vec<u8>, uuid: &Uuid) -> Vec<u8> {
    seal(&mut sector, uuid, Subject::Root);
    let mut page = sector.clone();
    page.resize(PAGE_BYTES as usize - SECTOR_BYTES, 0);
    page.extend(sector);
    page
}

/// Decodes a root page. If one sector has a root and the other sector has a mark, returns the root. See
/// [Note: Root pages].
///
/// # Errors
/// Fails if the page is damaged: it has no whole sector of this store and no sector of zeros, and another store did not
/// write it.
pub(crate) fn read(page: &[u8], uuid: &Uuid) -> Result<Found, Malformed> {
    let found = newest(page, uuid);
    let is_mark = |sector: Option<&[u8]>| sector.is_some_and(|sector| opened(sector, MAGIC_OF_MARK, uuid).is_ok());
    match found {
        Ok(Some(root)) => Ok(Found::Root(Box::new(root))),
        _ if is_mark(page.first_chunk::<SECTOR_BYTES>().map(|sector| &sector[..]))
            || is_mark(page.last_chunk::<SECTOR_BYTES>().map(|sector| &sector[..])) =>
        {
            Ok(Found::Mark)
        }
        Ok(None) => Ok(Found::Blank),
        // A new store writes its label before its marks. Until it has written the marks, the page has a root or mark of
        // the former store.
        Err(_) if is_of_another(page, uuid) => Ok(Found::Blank),
        Err(why) => Err(why),
    }
}

/// True if a page has a whole root or mark of another store.
fn is_of_another(page: &[u8], uuid: &Uuid) -> bool {
    page.chunks_exact(SECTOR_BYTES).any(|sector| {
        let mut fields = Fields::new(sector);
        let (Ok(magic), Ok(of)) = (fields.array(), fields.array::<16>()) else { return false };
        of != *uuid && [MAGIC, MAGIC_OF_MARK].contains(&magic) && opened(sector, magic, &of).is_ok()
    })
}

/// Decodes both sectors of a page and returns the newer root. Returns `None` if no sector has a root and one sector has
/// only zeros.
fn newest(page: &[u8], uuid: &Uuid) -> Result<Option<Root>, Malformed> {
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
            // If one sector is still zeros, the first write to this page was torn.
            let blank = |sector: &[u8]| sector.iter().all(|&byte| byte == 0);
            if sectors.into_iter().any(blank) { Ok(None) } else { Err(why) }
        }
    }
}

/// Encodes a root sector that has `fields` after its uuid, for fuzzing.
pub(crate) fn sealed(fields: &[u8], uuid: &Uuid) -> Vec<u8> {
    let mut sector = Vec::with_capacity(SECTOR_BYTES);
    sector.extend(MAGIC);
    sector.extend(uuid);
    sector.extend(fields.iter().take(SECTOR_BYTES - 8 - sector.len()));
    seal(&mut sector, uuid, Subject::Root);
    sector
}

/// Checks the magic, the uuid and the checksum of a sector. Returns the fields that follow the uuid.
pub(crate) fn opened<'a>(sector: &'a [u8], magic: [u8; 8], uuid: &Uuid) -> Result<Fields<'a>, Malformed> {
    let mut fields = Fields::new(sector);
    if fields.array()? != magic {
        return Err("it does not begin like a root".into());
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
        is_unclosed: flags & UNCLOSED != 0,
        other_flags: flags & !UNCLOSED,
        table_bytes: fields.u64()?,
        table_checksum: fields.u64()?,
        description_bytes: fields.u64()?,
        description_checksum: fields.u64()?,
        ..Root::default()
    };
    let mut both = || Ok::<_, Malformed>([fields.u64()?, fields.u64()?]);
    let (description, table, values, state) = (both()?, both()?, both()?, both()?);
    root.places = Places { description, table, values, state, spill: fields.u64()? };
    root.log = LogFields {
        offset: fields.u64()?,
        bytes: fields.u64()?,
        head_offset: fields.u64()?,
        head_checksum: fields.u64()?,
    };
    root.run = Run { commit: fields.u64()?, id: fields.array()?, ..Run::default() };
    fields.take(RESERVED_BYTES)?;
    root.features = fields.texts(FEATURE_BYTES_MAX)?;
    if root.generation == 0 || root.generation == u64::MAX {
        return Err(format!("it has the impossible generation {}", root.generation));
    }
    let Some(before) = fields.left().checked_sub(SECTOR_BYTES - IDENTITY_AT) else {
        return Err("its list of features overlaps the fields after it".into());
    };
    fields.take(before)?;
    root.run = Run { identity: fields.array()?, rank: fields.u32()?, ranks: fields.u32()?, ..root.run };
    let has = |feature: &str| root.features.iter().any(|one| one == feature);
    if root.log != LogFields::default() && !has(LOG) {
        return Err(format!("it names a log, but does not list the feature {LOG:?}"));
    }
    if root.run != Run::default() {
        if !(has(RANKS) && has(IDENTITY)) {
            return Err(format!("it names a run, but does not list the features {RANKS:?} and {IDENTITY:?}"));
        }
        if root.run.ranks == 0 {
            return Err(format!("it has the impossible rank {} of {}", root.run.rank, root.run.ranks));
        }
    }
    root.beside = Beside::of(fields.u64()?)?;
    match root.beside {
        Beside::Root(other) if (other ^ root.generation) & 1 == 0 => {
            Err(format!("it has the impossible generation {} beside generation {other}", root.generation))
        }
        _ => Ok(root),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: Uuid = [7; 16];

    fn root() -> Root {
        Root { uuid: UUID, generation: 3, features: vec![], ..Root::default() }
    }

    fn roundtrip(root: &Root) -> Result<(), String> {
        match read(&root.encode(), &UUID)? {
            Found::Root(root) => Ok(root.known()?),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn root_error_names_the_unknown_or_missing_feature_or_flag() {
        assert_eq!(roundtrip(&root()), Ok(()));
        let mut with_log = root();
        with_log.log.offset = 4096;
        assert!(roundtrip(&with_log).is_err_and(|why| why.contains("names a log")));
        with_log.features = vec![LOG.into()];
        assert_eq!(roundtrip(&with_log), Ok(()));
        let mut of_a_run = root();
        (of_a_run.run.commit, of_a_run.run.ranks) = (1, 1);
        for features in [vec![], vec![RANKS.into()], vec![IDENTITY.into()]] {
            of_a_run.features = features;
            assert!(roundtrip(&of_a_run).is_err_and(|why| why.contains("a run")));
        }
        of_a_run.features = vec![RANKS.into(), IDENTITY.into()];
        assert_eq!(roundtrip(&of_a_run), Ok(()));
        let of_tomorrow = Root { features: vec!["tomorrow".into()], ..root() };
        let wanted =
            "the store uses \"tomorrow\", which this version of memascend does not know: install a newer version";
        assert_eq!(roundtrip(&of_tomorrow), Err(wanted.into()));
        let flagged = Root { is_unclosed: true, other_flags: 1 << 40, ..root() };
        assert!(roundtrip(&flagged).is_err_and(|why| why.contains("uses flag 0x10000000000, which")));
    }

    #[test]
    fn root_decodes_to_the_encoded_fields() {
        let both = |first: u64| [first, first + 1];
        let full = Root {
            uuid: UUID,
            generation: 9,
            is_unclosed: true,
            other_flags: 4,
            table_bytes: 1,
            table_checksum: 2,
            description_bytes: 3,
            description_checksum: 4,
            places: Places { description: both(5), table: both(7), values: both(9), state: both(11), spill: 13 },
            log: LogFields { offset: 14, bytes: 15, head_offset: 16, head_checksum: 17 },
            run: Run { id: [18; 16], commit: 19, identity: [20; 16], rank: 21, ranks: 22 },
            features: vec![LOG.into(), RANKS.into(), IDENTITY.into()],
            beside: Beside::Root(8),
        };
        for beside in [Beside::Root(8), Beside::Mark] {
            let full = Root { beside, ..full.clone() };
            assert_eq!(read(&full.encode(), &UUID), Ok(Found::Root(Box::new(full))));
        }
        let of_a_replica = Root { run: Run { rank: 22, ..full.run }, ..full.clone() };
        assert_eq!(read(&of_a_replica.encode(), &UUID), Ok(Found::Root(Box::new(of_a_replica))));
        let foreign = Root { run: Run { ranks: 0, ..full.run }, ..full.clone() };
        assert!(read(&foreign.encode(), &UUID).is_err_and(|why| why.contains("rank 21 of 0")));
        for (beside, part) in [(7, "beside generation 7"), (0, "does not say")] {
            let impossible = Root { beside: Beside::Root(beside), ..full.clone() };
            assert!(read(&impossible.encode(), &UUID).is_err_and(|why| why.contains(part)));
        }
    }

    #[test]
    fn torn_root_page_reads_as_a_mark_only_without_a_whole_root() {
        let (mark, blank, root) = (mark(&UUID), vec![0; PAGE_BYTES as usize], root().encode());
        let torn = |first: &[u8], last: &[u8]| {
            let (half, sector) = (PAGE_BYTES as usize / 2, |page: &[u8]| page[PAGE_BYTES as usize / 2..].to_vec());
            let found = read(&[&first[..half], &sector(last)].concat(), &UUID);
            found.map(|found| match found {
                Found::Blank => 'b',
                Found::Mark => 'm',
                Found::Root(_) => 'r',
            })
        };
        let damaged = {
            let mut page = mark.clone();
            page[30] ^= 1;
            page[PAGE_BYTES as usize - 30] ^= 1;
            page
        };
        let pages = [&mark, &blank, &root, &damaged];
        let found = pages.map(|first| pages.map(|last| torn(first, last).unwrap_or('!')));
        assert_eq!(found, [['m', 'm', 'r', 'm'], ['m', 'b', 'r', 'b'], ['r', 'r', 'r', 'r'], ['m', 'b', 'r', '!']]);
        assert_eq!(read(&super::mark(&[8; 16]), &UUID), Ok(Found::Blank), "of another store");
    }
}
