//! Tests flipped bits, misdirected writes, lost writes, foreign bytes and random bytes.
//!
//! An opening or a read of a damaged store must return a specific error or the right bytes. It must never panic and
//! never return wrong bytes.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::model::{self, check, commit, many, ok, side_by_side, size, striped};
use memascend_mem::Wait;
use memascend_nvme::sim::{Faults, Rng, SimDisk};
use memascend_store::{
    Commit, Error, Info, RecordState, Store, parse_description, parse_head_fields, parse_label, parse_root,
    parse_root_fields,
};
use proptest::prelude::*;

/// Returns three things: the bytes of a device with a store at step 2, the live extents of this store (record, offset,
/// bytes), and the offset of the first extent.
fn trained() -> (Vec<u8>, Vec<(usize, u64, u64)>, u64) {
    let disks = model::disks(1);
    let store = model::trained(&disks, 2);
    let (mut extents, mut first) = (Vec::new(), u64::MAX);
    for record in 0..store.description().records.len() {
        let slot = usize::from(ok(store.record_state(record)).slot);
        for extent in 0..store.layout().extents_of(record) {
            let layout = store.layout().extent(store.description(), record, extent);
            let offsets = [0, 1].map(|of| store.layout().offset(&layout, of));
            first = first.min(offsets[0]).min(offsets[1]);
            extents.push((record, offsets[slot], layout.bytes()));
        }
    }
    (disks[0].bytes(), extents, first)
}

/// Opens a store and verifies it. Returns the store's step, or the text of the error.
fn outcome(bytes: Vec<u8>) -> Result<u64, String> {
    found_on(&SimDisk::of(bytes))
}

fn found_on(disk: &SimDisk) -> Result<u64, String> {
    let store = model::open(std::slice::from_ref(disk), &model::how()).map_err(|error| named(&error))?;
    store.verify(&mut |_, _| true).map_err(|error| named(&error))?;
    Ok(check(&store, "damaged"))
}

/// Returns the state of a store and of all its records.
fn known(store: &Store) -> (Info, Vec<RecordState>) {
    let records = 0..store.description().records.len();
    (store.info(), records.map(|record| ok(store.record_state(record))).collect())
}

fn named(error: &Error) -> String {
    assert!(matches!(error, Error::Corrupt { .. } | Error::Refused { .. }), "{error}");
    error.to_string()
}

#[test]
fn flipped_bit_in_the_catalog_is_rejected_or_read_from_a_copy() {
    let (bytes, _, end) = trained();
    let store = ok(model::open(&[SimDisk::of(bytes.clone())], &model::how()));
    let whole = known(&store);
    let total = size(store.info().total_bytes);
    // The offsets of the pages that exist twice, each with the beginning of the report about a flipped bit in this
    // page.
    let copies = [
        (0, "the first label of"),
        (3 * 4096, "the first copy of the description"),
        (total - 8192, "the second copy of the description"),
        (bytes.len() - 4096, "the second label of"),
    ];
    let head = size(end) / 512;
    let sectors: Vec<usize> = (0..head)
        .chain(copies[2..].iter().flat_map(|(at, _)| at / 512..at / 512 + 8))
        .map(|sector| sector * 512)
        .collect();
    let stride = many(1, 47);
    let errors = AtomicUsize::new(0);
    side_by_side(0..sectors.len() as u64, |number| {
        let disk = SimDisk::of(bytes.clone());
        let number = size(number);
        let from = sectors[number];
        let copy = copies.iter().find(|(at, _)| (*at..at + 4096).contains(&from)).map(|(_, name)| name);
        // Flips one bit at a time. Tests fewer bytes of a blank sector than of any other sector.
        let blank = bytes[from..from + 512].iter().all(|&byte| byte == 0);
        let (first, step) = if blank { (from, many(16, 128)) } else { (from + number % stride, stride) };
        for at in (first..from + 512).step_by(step) {
            disk.flip(at, 1 << (at % 8));
            let opened = model::open(std::slice::from_ref(&disk), &model::how()).map_err(|error| named(&error));
            disk.flip(at, 1 << (at % 8));
            match opened {
                Ok(store) => {
                    assert_eq!(known(&store), whole, "byte {at}");
                    // The bit was flipped back after the opening. So the test checks the damage that the opening noted,
                    // not the device.
                    assert_eq!(store.noted_damage().len(), usize::from(copy.is_some()), "byte {at}");
                    let named = |name: &&str| store.noted_damage()[0].starts_with(*name);
                    assert!(copy.is_none_or(named), "byte {at}: {:?}", store.noted_damage());
                    // Checks all extents. They match only if the store has loaded the right checksums.
                    if at % 257 == 0 {
                        assert_eq!(check(&store, "flipped"), 2, "byte {at}");
                    }
                }
                Err(why) => {
                    errors.fetch_add(1, Ordering::Relaxed);
                    assert!(why.contains("damaged") && copy.is_none(), "byte {at}: {why}");
                }
            }
        }
    });
    // The pages of the live table have no copy, so each flipped bit in them must be an error.
    let errors = errors.into_inner() * stride;
    assert!(errors > 1000, "{errors}");
}

#[test]
fn flipped_bit_in_a_chunk_is_found_by_its_checksum() {
    let (bytes, extents, _) = trained();
    let chosen: Vec<_> = extents.iter().step_by(5).collect();
    side_by_side(0..chosen.len() as u64, |number| {
        let &(record, offset, nbytes) = chosen[size(number)];
        let disk = SimDisk::of(bytes.clone());
        for at in (offset..offset + nbytes).step_by(many(7, 127)) {
            let byte = size(at);
            disk.flip(byte, 0x10);
            let why = found_on(&disk).map_err(|why| why.contains("damaged") && why.contains("checksum"));
            disk.flip(byte, 0x10);
            assert_eq!(why, Err(true), "record {record}, byte {at}");
        }
    });
}

#[test]
fn lost_or_misplaced_extent_is_found() {
    let (bytes, extents, _) = trained();
    let range = |offset: u64, nbytes: u64| size(offset)..size(offset + nbytes);
    for pair in extents.windows(2).filter(|pair| pair[0].2 == pair[1].2) {
        let mut swapped = bytes.clone();
        let (one, two) = (range(pair[0].1, pair[0].2), range(pair[1].1, pair[1].2));
        swapped.copy_within(one, two.start);
        assert!(outcome(swapped).is_err());
    }
    for &(_, offset, nbytes) in &extents {
        let mut lost = bytes.clone();
        lost[range(offset, nbytes)].fill(0);
        assert!(outcome(lost).is_err());
    }
}

#[test]
fn a_lost_table_page_is_found() {
    // A table page of an older generation has a valid checksum of its own. Only the root's checksum of the whole table
    // detects this page.
    let disks = model::disks(1);
    let store = model::created(&disks);
    let mut images = Vec::new();
    for step in 0..=3 {
        ok(commit(&store, step));
        images.push(disks[0].bytes());
    }
    let end = images[0].len();
    // Steps 3 and 1 use the same slot of the table. Replaces one page of step 3 at a time by the page of step 1, as if
    // the write of this page had been lost.
    let mut found = 0;
    for at in (0..end).step_by(4096) {
        if images[3][at..at + 4096] != images[1][at..at + 4096] {
            let mut lost = images[3].clone();
            lost[at..at + 4096].copy_from_slice(&images[1][at..at + 4096]);
            match outcome(lost) {
                // If the page of the newest root was lost, the store opens at the step before. A lost page of the other
                // root, or of data that the newest root does not name, has no effect.
                Ok(step) => assert_eq!(step, if at == 4096 { 2 } else { 3 }, "page at {at}"),
                Err(_) => found += 1,
            }
        }
    }
    assert!(found > 5, "{found}");
}

#[test]
fn open_error_names_a_truncated_or_foreign_store() {
    let (bytes, ..) = trained();
    let cut = outcome(bytes[..bytes.len() / 2].to_vec());
    assert!(cut.as_ref().is_err_and(|why| why.contains("truncated")), "{cut:?}");
    let foreign = outcome((0..bytes.len()).map(|at| u8::try_from(at % 251).unwrap_or(0)).collect());
    assert!(foreign.as_ref().is_err_and(|why| why.contains("no store")), "{foreign:?}");
    assert!(outcome(vec![0; bytes.len()]).is_err_and(|why| why.contains("no store")));
}

#[test]
fn flipped_bit_in_a_used_log_page_is_named_and_in_others_ignored() {
    let found = model::large_disks(1);
    let store = model::trained(&found, 0);
    ok(store.keep_log(&model::LOGGED, 16));
    (1..=6).for_each(|step| ok(commit(&store, step)));
    drop(store);
    let log = ok(model::open(&found, &model::how())).log_state();
    assert!(log.steps >= 4 && log.records == 5, "{log:?}");
    let (begin, end) = (log.offset, log.offset + log.bytes);
    let (mut gradients, mut heads, mut unseen) = (0, 0_u64, 0);
    let pages = (begin..end.min(begin + (240 << 10))).step_by(4096);
    // Tests each page twice. The first flipped bit is at byte 3, where the head of a step has its magic number, and the
    // second at byte 24.
    for (page, at) in pages.flat_map(|page| [(page, 3), (page, 24)]) {
        let disks = [found[0].after_power_loss(0)];
        disks[0].flip(size(page) + at, 4);
        let opened = model::open(&disks, &model::how());
        match opened.and_then(|store| model::replayed(&store).map(|state| (store, state))) {
            Ok((store, state)) => {
                assert!(state == *model::after(6), "offset {page}");
                ok(store.verify(&mut |_, _| true));
                unseen += 1;
            }
            Err(Error::Corrupt { what, offset, nbytes, .. }) => {
                assert!((offset..offset + nbytes).contains(&page), "{what}, not at offset {page}");
                if what.contains("of the gradient of") {
                    gradients += 1;
                    let store = ok(model::open(&disks, &model::how()));
                    assert!(store.verify(&mut |_, _| true).is_err_and(|error| error.to_string().contains(&what)));
                } else {
                    assert!(what.contains("head of"), "{what}");
                    heads += 1;
                }
            }
            Err(error) => panic!("offset {page}: {error}"),
        }
    }
    assert!(gradients > 8 && heads == 2 * log.steps && unseen > 5, "{gradients}, {heads}, {unseen}");
}

fn encoded() -> Vec<u8> {
    let (bytes, ..) = trained();
    bytes[4096 * 3..].to_vec()
}

#[test]
fn parse_root_rejects_a_truncated_page() {
    let bytes = trained().0;
    let (page, uuid) = (&bytes[4096..8192], &model::UUID);
    assert!(matches!(parse_root(page, uuid), Ok(Some(_))));
    for length in 1..512 {
        assert!(parse_root(&page[..length], uuid).is_err(), "{length} bytes");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: many(3000, 200), ..ProptestConfig::default() })]

    #[test]
    fn parsers_accept_any_bytes_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..9000)) {
        prop_assert!(!parse_label(&bytes).is_empty());
        drop(parse_root(&bytes, &model::UUID));
        let fields = parse_root_fields(&bytes);
        prop_assert!(!fields.is_err_and(|why| why.contains("when it is written again")));
        drop(parse_description(&bytes));
        drop(parse_head_fields(&bytes));
    }
}

#[test]
fn a_changed_description_is_refused_or_within_its_bounds() {
    let original = encoded();
    let end = (0..original.len()).find(|&end| parse_description(&original[..end]).is_ok());
    let original = &original[..end.unwrap_or_else(|| panic!("the bytes have no valid description"))];
    let mut rng = Rng::new(7);
    for _ in 0..many(20_000, 3000) {
        let mut bytes = original.to_vec();
        for _ in 0..=rng.below(4) {
            let at = rng.below(bytes.len());
            bytes[at] = [0, 1, 0x7f, 0xff, u8::try_from(rng.below(256)).unwrap_or(0)][rng.below(5)];
        }
        bytes.truncate(bytes.len() - if rng.chance(200) { rng.below(bytes.len()) } else { 0 });
        if let Ok(description) = parse_description(&bytes) {
            assert!(description.check().is_ok());
        }
    }
}

/// Opens a store on devices whose stripes have `stripe` bytes.
fn open_striped(disks: &[SimDisk], stripe: u64) -> Result<Store, Error> {
    Store::open_on(striped(disks, stripe, &Faults::default()), stripe, &model::how())
}

/// Returns copies of a store's devices at commits 0 to 8 of one run. Then come copies at commits 6 to 8 of a second
/// run, which continued from commit 5 of the first run.
fn copies_of_lines(count: usize, stripe: u64) -> Vec<Vec<SimDisk>> {
    let disks = model::large_disks(count);
    let there = striped(&disks, stripe, &Faults::default());
    let store = ok(Store::create_on(there, stripe, model::description(), &model::how()));
    let mut found = Vec::new();
    for number in 0..=8 {
        ok(commit(&store, number));
        found.push(model::copies(&disks));
    }
    let other = model::copies(&found[5]);
    let store = ok(open_striped(&other, stripe));
    ok(model::settle(&store));
    for step in 6..=8 {
        (0..store.description().records.len())
            .for_each(|record| ok(model::stage(&store, record, &model::contents(&store, record, 99 + step, step))));
        ok(store.commit(Commit { step, ..Commit::default() }, Wait::forever()));
        found.push(model::copies(&other));
    }
    found
}

#[test]
fn devices_that_hold_copies_of_different_commits_are_refused() {
    // If one device is one commit ahead of the others, it still has all extents of the previous commit. So the store
    // may open.
    let before = |number: usize| if number == 9 { 5 } else { number.wrapping_sub(1) };
    let mut refused = 0;
    for (count, stripe) in [(2, 64 << 10), (3, 64 << 10), (2, 8192)] {
        let lines = copies_of_lines(count, stripe);
        for (first, other) in (0..lines.len()).flat_map(|first| (0..lines.len()).map(move |other| (first, other))) {
            let mixed = model::copies(&[&lines[first][..count - 1], &lines[other][count - 1..]].concat());
            match open_striped(&mixed, stripe) {
                Ok(store) => {
                    ok(store.verify(&mut |_, _| true));
                    assert!(first == other || first == before(other), "{first} with {other} of {count}");
                }
                Err(error) => {
                    assert!(first != other, "{first} of {count}: {error}");
                    let why = named(&error);
                    refused += usize::from(why.contains("not of one commit") || why.contains("of different commits"));
                }
            }
        }
    }
    assert!(refused > 100, "{refused}");
}
