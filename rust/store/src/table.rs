//! Encodes and decodes the table of a commit. Each page of the table has a checksum. A commit writes only the pages
//! that changed.
//!
//! Pages: `committed steps | user value | hyperparameters | records | checksums of the extents`

use std::ops::Range;

use crate::{
    Description,
    checksum::{Subject, Uuid, checksum},
    fields::{Fields, Malformed},
    index::Index,
    layout::PAGE_BYTES,
};

/// Bytes of a page before its checksum.
pub(crate) const PAYLOAD_BYTES: usize = PAGE_BYTES as usize - 8;
/// Bytes of a record in the table: slot, version and step.
const RECORD_BYTES: usize = 24;
const RECORDS_PER_PAGE: u64 = (PAYLOAD_BYTES / RECORD_BYTES) as u64;
const SUMS_PER_PAGE: u64 = (PAYLOAD_BYTES / 8) as u64;

/// For each part of the table, the range of its pages. Page 0 has the number of committed steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sections {
    pub(crate) user: Range<u64>,
    pub(crate) hyperparameters: Range<u64>,
    pub(crate) records: Range<u64>,
    pub(crate) sums: Range<u64>,
}

impl Sections {
    pub(crate) fn new(description: &Description, extents: u32) -> Self {
        let text = |bytes_max: u32| (4 + u64::from(bytes_max)).div_ceil(PAYLOAD_BYTES as u64);
        let user = 1..1 + text(description.user_bytes_max);
        let hyperparameters = user.end..user.end + text(description.hyperparameters_bytes_max);
        let records = description.records.len() as u64;
        let records = hyperparameters.end..hyperparameters.end + records.div_ceil(RECORDS_PER_PAGE);
        let sums = records.end..records.end + u64::from(extents).div_ceil(SUMS_PER_PAGE);
        Self { user, hyperparameters, records, sums }
    }

    pub(crate) fn pages(&self) -> u64 {
        self.sums.end
    }

    /// Returns the page that has a record's slot, version and step.
    pub(crate) fn page_of_record(&self, record: usize) -> u64 {
        self.records.start + record as u64 / RECORDS_PER_PAGE
    }

    /// Returns the pages that have the checksums of a range of extents.
    pub(crate) fn pages_of_sums(&self, extents: Range<u32>) -> Range<u64> {
        if extents.is_empty() {
            return 0..0;
        }
        let page = |extent: u32| self.sums.start + u64::from(extent) / SUMS_PER_PAGE;
        page(extents.start)..page(extents.end - 1) + 1
    }

    /// Fills `bytes` with a page of the commit that is being made, and returns the page's checksum.
    pub(crate) fn encode(&self, index: &Index, page: u64, uuid: &Uuid, bytes: &mut [u8]) -> u64 {
        bytes.fill(0);
        let (payload, sum_bytes) = bytes.split_at_mut(PAYLOAD_BYTES);
        if page == 0 {
            put(payload, 0, index.next_step);
        } else if self.user.contains(&page) {
            put_text(payload, &index.user, page - self.user.start);
        } else if self.hyperparameters.contains(&page) {
            put_text(payload, &index.hyperparameters, page - self.hyperparameters.start);
        } else if self.records.contains(&page) {
            let first = ((page - self.records.start) * RECORDS_PER_PAGE) as usize;
            for (at, record) in index.records.iter().skip(first).take(RECORDS_PER_PAGE as usize).enumerate() {
                let slot = record.next_slot();
                for (field, value) in [slot as u64, record.versions[slot], record.steps[slot]].into_iter().enumerate() {
                    put(payload, at * RECORD_BYTES + field * 8, value);
                }
            }
        } else {
            let first = (page - self.sums.start) * SUMS_PER_PAGE;
            let last = (first + SUMS_PER_PAGE).min(index.extent_count());
            for (at, extent) in (first..last).enumerate() {
                put(payload, at * 8, index.next_sum(extent as usize));
            }
        }
        let sum = checksum(uuid, Subject::TablePage, (page, 0), 0, payload);
        sum_bytes.copy_from_slice(&sum.to_le_bytes());
        sum
    }

    /// Checks a page that was read, and stores its content in the index or in one of the two texts. Returns the page's
    /// checksum.
    ///
    /// Pages must come in order: pages of checksums need the live slots that pages of records set. The capacity of
    /// `user` and `hyperparameters` bounds their lengths.
    pub(crate) fn decode(
        &self,
        index: &mut Index,
        [user, hyperparameters]: &mut [Vec<u8>; 2],
        page: u64,
        (uuid, bytes): (&Uuid, &[u8]),
    ) -> Result<u64, Malformed> {
        let (payload, sum_bytes) = bytes.split_at(PAYLOAD_BYTES);
        let sum = checksum(uuid, Subject::TablePage, (page, 0), 0, payload);
        if sum.to_le_bytes() != sum_bytes {
            return Err("its checksum is wrong".into());
        }
        let mut fields = Fields::new(payload);
        if page == 0 {
            index.step = fields.u64()?;
            index.next_step = index.step;
        } else if self.user.contains(&page) {
            take_text(user, payload, page - self.user.start)?;
        } else if self.hyperparameters.contains(&page) {
            take_text(hyperparameters, payload, page - self.hyperparameters.start)?;
        } else if self.records.contains(&page) {
            let first = ((page - self.records.start) * RECORDS_PER_PAGE) as usize;
            let generation = index.generation;
            for record in index.records.iter_mut().skip(first).take(RECORDS_PER_PAGE as usize) {
                let (slot, version, step) = (fields.u64()?, fields.u64()?, fields.u64()?);
                if slot > 1 || version > generation {
                    return Err(format!(
                        "slot {slot} and version {version} of a record are impossible at generation {generation}"
                    ));
                }
                record.live = slot as u8;
                record.versions[slot as usize] = version;
                record.steps[slot as usize] = step;
            }
        } else {
            let first = (page - self.sums.start) * SUMS_PER_PAGE;
            let last = (first + SUMS_PER_PAGE).min(index.extent_count());
            for extent in first..last {
                index.set_live_sum(extent as usize, fields.u64()?);
            }
        }
        Ok(sum)
    }
}

/// Returns the checksum over the checksums of all pages. This checksum detects a page of another generation.
pub(crate) fn table_checksum(uuid: &Uuid, generation: u64, page_sums: &[u64]) -> u64 {
    let bytes: Vec<u8> = page_sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    checksum(uuid, Subject::TablePages, (0, 0), generation, &bytes)
}

fn put(payload: &mut [u8], at: usize, value: u64) {
    payload[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Writes to `payload` the bytes of page `page` of a text, counted from the text's first page. The text's length comes
/// before its bytes.
fn put_text(payload: &mut [u8], text: &str, page: u64) {
    let length = (text.len() as u32).to_le_bytes();
    let start = page as usize * PAYLOAD_BYTES;
    let stream = length.iter().chain(text.as_bytes()).skip(start);
    payload.iter_mut().zip(stream).for_each(|(to, from)| *to = *from);
}

/// Reads from `payload` the bytes of page `page` of a text. Page 0 sets the text's length; fails if the length exceeds
/// the capacity of `text`.
fn take_text(text: &mut Vec<u8>, payload: &[u8], page: u64) -> Result<(), Malformed> {
    if page == 0 {
        let nbytes = Fields::new(payload).u32()? as usize;
        let room = text.capacity();
        if nbytes > room {
            return Err(format!("it has a text of {nbytes} bytes, but there is room for only {room}"));
        }
        text.clear();
        text.resize(nbytes, 0);
    }
    let (skip, start) = if page == 0 { (4, 0) } else { (0, page as usize * PAYLOAD_BYTES - 4) };
    let Some(rest) = text.get_mut(start..) else { return Ok(()) };
    rest.iter_mut().zip(&payload[skip..]).for_each(|(to, from)| *to = *from);
    Ok(())
}
