//! Reconstructs stores of version 1 as its own code wrote them, from files.
//!
//! A file begins with the number of devices. Of each: the number of its pages, then records. 0: so many pages of zeros. 1:
//! a page of the catalog, as pairs of a number of zeros and of bytes that follow, up to an empty pair. 2: a page of a piece
//! of the toy's: entry, piece, update, salt, which page of it.

use memascend_nvme::sim::SimDisk;

use crate::toy;

const PAGE_BYTES: usize = 4096;

struct Record<'a>(&'a [u8]);

impl Record<'_> {
    fn number(&mut self, nbytes: usize) -> usize {
        let (bytes, rest) = self.0.split_at(nbytes);
        self.0 = rest;
        bytes.iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte))
    }

    fn page(&mut self) -> Vec<u8> {
        let mut page = Vec::with_capacity(PAGE_BYTES);
        loop {
            let (zeros, nbytes) = (self.number(2), self.number(2));
            if zeros + nbytes == 0 {
                page.resize(PAGE_BYTES, 0);
                return page;
            }
            page.resize(page.len() + zeros, 0);
            let (bytes, rest) = self.0.split_at(nbytes);
            page.extend(bytes);
            self.0 = rest;
        }
    }

    fn piece(&mut self) -> Vec<u8> {
        let (entry, piece, update) = (self.number(1), self.number(1), self.number(1));
        let (salt, page) = (self.number(2), self.number(2));
        let piece = u32::try_from(piece).unwrap_or(0);
        toy::content(entry, piece, (update ^ salt) as u64, (page + 1) * PAGE_BYTES).split_off(page * PAGE_BYTES)
    }
}

/// The devices of a store, each with so many more bytes as say how much room there is behind it.
pub(crate) fn disks(name: &str, room: usize) -> Vec<SimDisk> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/version_1/{name}.pages"));
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut record = Record(&bytes);
    let count = record.number(1);
    let mut disk = |_| {
        let nbytes = record.number(4) * PAGE_BYTES;
        let mut medium = Vec::with_capacity(nbytes + room);
        while medium.len() < nbytes {
            match record.number(1) {
                0 => medium.resize(medium.len() + record.number(4) * PAGE_BYTES, 0),
                1 => medium.extend(record.page()),
                _ => medium.extend(record.piece()),
            }
        }
        medium.resize(nbytes + room, 0);
        SimDisk::of(medium)
    };
    let disks = (0..count).map(&mut disk).collect();
    assert!(record.0.is_empty());
    disks
}
