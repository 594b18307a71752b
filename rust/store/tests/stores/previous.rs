//! Tests `Existing::Previous`, which opens the previous commit if the newest commit is damaged or unwanted.
//!
//! The previous commit must open only if all its bytes are undamaged, and only with `Existing::Previous`.

use std::slice;

use crate::model::{self, check, commit, ok, opened, size};
use memascend_mem::Wait;
use memascend_nvme::{
    Action,
    sim::{Faults, SimDisk},
};
use memascend_store::{Create, Durability, Error, Existing, Store};

/// The offsets of the root pages of slots 0 and 1, on one device.
const ROOTS: [usize; 2] = [4096, 8192];
const PAGE: usize = 4096;

fn newest() -> Create {
    model::existing(Existing::Resume)
}

fn previous() -> Create {
    model::existing(Existing::Previous)
}

/// Returns a device with a store at step `last`. This step is generation `last + 1`. With `staged`, record 0 of the
/// next step is staged.
fn trained(last: u64, staged: bool) -> SimDisk {
    let disks = model::disks(1);
    let store = model::trained(&disks, last);
    if staged {
        ok(model::stage(&store, 0, &model::contents(&store, 0, 9, last + 1)));
    }
    drop(store);
    SimDisk::of(disks[0].bytes())
}

/// Returns the offset of the page with the newest root, and the offset of the page with the previous root.
fn pages(last: u64) -> (usize, usize) {
    let slot = size((last + 1) & 1);
    (ROOTS[slot], ROOTS[1 - slot])
}

/// Damages both copies of the root in a page.
fn damage_root(disk: &SimDisk, page: usize) {
    disk.flip(page + 40, 0x10);
    disk.flip(page + PAGE - 512 + 40, 0x10);
}

/// Returns the ranges of both tables on the device. The tables are between the description and the values.
fn tables(disk: &SimDisk) -> [std::ops::Range<usize>; 2] {
    let store = ok(model::open(slice::from_ref(disk), &newest()));
    let values = size(store.layout().offset(&store.layout().extent(store.description(), 0, 0), 0));
    let half = (values - 3 * PAGE - PAGE) / 2;
    [values - 2 * half..values - half, values - half..values]
}

fn error_of(disk: &SimDisk, how: &Create) -> Error {
    match model::open(slice::from_ref(disk), how) {
        Ok(store) => panic!("opened at step {}", store.info().step),
        Err(error) => error,
    }
}

#[test]
fn damaged_root_is_rejected_and_previous_opens_the_other_commit() {
    for (newer, whole) in [(true, 2), (false, 3)] {
        let disk = trained(3, false);
        damage_root(&disk, if newer { pages(3).0 } else { pages(3).1 });
        let before = disk.bytes();
        let refused = error_of(&disk, &newest());
        let text = refused.to_string();
        assert!(matches!(refused, Error::Corrupt { .. }), "{text}");
        assert!(text.contains(&format!("step {whole}, is whole: existing=\"previous\"")), "{text}");
        assert!(disk.bytes() == before, "a rejected call changed the device");

        assert_eq!(opened(slice::from_ref(&disk), &previous()), Ok(whole));
        // After the opening above, this commit is the newest commit. An opening without `Existing::Previous` must find
        // it, and training must be able to continue from it.
        let disks = [disk.after_power_loss(1)];
        assert_eq!(opened(&disks, &newest()), Ok(whole));
        let only = opened(&disks, &previous());
        assert!(only.as_ref().is_err_and(|why| why.contains("one commit and none before it")), "{only:?}");
        let store = ok(model::open(&disks, &newest()));
        for step in whole + 1..whole + 4 {
            ok(commit(&store, step));
            assert_eq!(opened(&[disks[0].after_power_loss(step)], &newest()), Ok(step));
        }
    }
}

/// Returns a copy of the device with zeros in a root page.
fn without_root(disk: &SimDisk, page: usize) -> SimDisk {
    let mut bytes = disk.bytes();
    bytes[page..page + PAGE].fill(0);
    SimDisk::of(bytes)
}

/// Checks that a normal opening fails. The error must name the reason, and must advise the user to open step `step`
/// with `Existing::Previous`. Then checks that `Existing::Previous` opens this step.
fn is_lost(disk: &SimDisk, step: u64) {
    let before = disk.bytes();
    let refused = error_of(disk, &newest());
    let text = refused.to_string();
    assert!(matches!(refused, Error::Corrupt { .. }) && text.contains("it is blank"), "{text}");
    assert!(text.contains(&format!("step {step}, is whole: existing=\"previous\"")), "{text}");
    assert!(disk.bytes() == before, "a rejected call changed the device");
    assert_eq!(opened(slice::from_ref(disk), &previous()), Ok(step));
    assert_eq!(opened(slice::from_ref(disk), &newest()), Ok(step));
}

#[test]
fn root_of_zeros_is_found_in_either_page() {
    // If `last` is 1, the newest root is in a page that had no root before.
    for last in [1, 2, 3] {
        let disk = trained(last, false);
        is_lost(&without_root(&disk, pages(last).0), last - 1);
        // Overwrites the older root. A normal opening cannot know that the lost root was the older root, so the opening
        // must fail. `Existing::Previous` must then keep the newest commit.
        is_lost(&without_root(&disk, pages(last).1), last);
    }
    let disk = trained(0, false);
    let (one, both) = (without_root(&disk, pages(0).0), without_root(&without_root(&disk, pages(0).0), pages(0).1));
    for lost in [one, both, without_root(&without_root(&trained(3, false), pages(3).0), pages(3).1)] {
        let before = lost.bytes();
        for how in [newest(), previous()] {
            let refused = error_of(&lost, &how);
            let text = refused.to_string();
            assert!(matches!(refused, Error::Corrupt { .. }) && text.contains("keep this store"), "{text}");
        }
        assert!(lost.bytes() == before, "a rejected call changed the device");
    }
}

#[test]
fn root_of_zeros_is_found_after_opening_with_previous() {
    let disks = [trained(3, false)];
    assert_eq!(opened(&disks, &previous()), Ok(2));
    assert_eq!(opened(&model::after_loss(&disks, 1), &newest()), Ok(2));
    let store = ok(model::open(&disks, &newest()));
    ok(commit(&store, 3));
    drop(store);
    is_lost(&without_root(&SimDisk::of(disks[0].bytes()), pages(3).0), 2);
}

#[test]
fn root_of_zeros_is_found_in_a_closed_non_durable_store() {
    let mut how = model::how();
    how.durability = Durability::None;
    for last in 1..6 {
        let disks = model::disks(1);
        let store = model::created_as(&disks, &how);
        (0..=last).for_each(|step| ok(commit(&store, step)));
        ok(store.close(Wait::forever()));
        drop(store);
        assert_eq!(opened(&disks, &newest()), Ok(last));
        for page in ROOTS {
            let error = error_of(&without_root(&SimDisk::of(disks[0].bytes()), page), &newest());
            assert!(matches!(error, Error::Corrupt { .. }) && error.to_string().contains("it is blank"), "{error}");
        }
    }
}

#[test]
fn previous_is_rejected_once_the_next_step_has_staged_a_record() {
    for damaged in [false, true] {
        let disk = trained(3, true);
        if damaged {
            damage_root(&disk, pages(3).0);
        }
        let before = disk.bytes();
        let error = error_of(&disk, &previous());
        let text = error.to_string();
        assert!(matches!(error, Error::Corrupt { .. }) && text.contains("weight"), "{text}");
        assert!(text.contains("the previous commit, step 2") && text.contains("Nothing was changed"), "{text}");
        assert!(disk.bytes() == before, "a rejected call changed the device");
        if !damaged {
            assert_eq!(opened(slice::from_ref(&disk), &newest()), Ok(3));
        }
    }
}

#[test]
fn damaged_table_is_rejected_and_previous_opens_the_other_commit() {
    let whole = trained(3, false);
    let tables = tables(&whole);
    let newer = tables[usize::from((3 + 1) & 1 == 1)].clone();
    let mut found = 0;
    for page in newer.clone().step_by(PAGE) {
        let disk = SimDisk::of(whole.bytes());
        disk.flip(page + 5, 4);
        let text = error_of(&disk, &newest()).to_string();
        assert!(text.contains("table") && text.contains("existing=\"previous\""), "{page}: {text}");
        assert_eq!(opened(slice::from_ref(&disk), &previous()), Ok(2), "{page}");
        assert_eq!(opened(slice::from_ref(&disk), &newest()), Ok(2), "{page}");
        found += 1;
    }
    assert!(found > 4, "{found}");
    // Damages both tables, so both commits are damaged. Each opening must fail, and the error about the newest commit
    // must mention the other commit.
    let disk = SimDisk::of(whole.bytes());
    for table in &tables {
        disk.flip(table.start + 5, 4);
    }
    let text = error_of(&disk, &newest()).to_string();
    assert!(text.contains("no other commit is whole"), "{text}");
    assert!(matches!(error_of(&disk, &previous()), Error::Corrupt { .. }));
}

#[test]
fn previous_is_rejected_without_an_undamaged_previous_commit() {
    let disk = trained(0, false);
    let error = error_of(&disk, &previous());
    assert!(matches!(error, Error::Invalid(_)) && error.to_string().contains("existing=\"resume\""), "{error}");
    damage_root(&disk, pages(0).0);
    for how in [newest(), previous()] {
        assert!(matches!(error_of(&disk, &how), Error::Corrupt { .. }));
    }
    let disk = trained(3, false);
    for page in ROOTS {
        damage_root(&disk, page);
    }
    for how in [newest(), previous()] {
        assert!(matches!(error_of(&disk, &how), Error::Corrupt { .. }));
    }
}

#[test]
fn power_loss_during_previous_leaves_the_former_or_previous_commit() {
    for damaged in [false, true] {
        let image = trained(3, false);
        if damaged {
            damage_root(&image, pages(3).0);
        }
        let as_before = opened(&[SimDisk::of(image.bytes())], &newest());
        let run = |disk: &SimDisk, faults: &Faults| {
            let store = Store::open_on(model::volume(slice::from_ref(disk), faults), model::STRIPE, &previous());
            store.map(|store| {
                let stats = store.volume().stats();
                stats.written.requests + stats.read.requests + stats.flushes
            })
        };
        let points = ok(run(&SimDisk::of(image.bytes()), &Faults::default()));
        assert!(points > 20, "{points}");
        let (mut untouched, mut gone_back) = (0, 0);
        // `points` may be too small by a few requests, because the volume counts a request only after its answer.
        for point in (0..=points + 2).step_by(model::many(1, 2)) {
            let disk = SimDisk::of(image.bytes());
            let done = run(&disk, &Faults { dies_after: Some(point), ..Faults::default() });
            assert!(done.is_ok() == (point >= points) || point.abs_diff(points) <= 2, "{point} of {points}");
            let mut left: Vec<SimDisk> = (0..model::many(20, 2)).map(|loss| disk.after_power_loss(loss)).collect();
            left.push(SimDisk::of(disk.bytes()));
            for left in left {
                let name = format!("damaged {damaged}, point {point}");
                match opened(slice::from_ref(&left), &newest()) {
                    Ok(2) => gone_back += 1,
                    found => {
                        assert!(done.is_err() && found == as_before, "{name}: {found:?}");
                        assert_eq!(opened(slice::from_ref(&left), &previous()), Ok(2), "{name}");
                        untouched += 1;
                    }
                }
            }
        }
        assert!(untouched > 0 && gone_back > 0, "{untouched}, {gone_back}");
    }
}

#[test]
fn previous_opens_again_after_a_device_error() {
    let image = trained(3, false);
    damage_root(&image, pages(3).0);
    let mut failed = 0;
    for seed in 0..60 {
        let disk = SimDisk::of(image.bytes());
        let errors =
            vec![(Action::Read, model::EIO, 30), (Action::Write, model::EIO, 500), (Action::Flush, model::EIO, 300)];
        let faults = Faults { seed, errors, ..Faults::default() };
        let volume = model::volume(slice::from_ref(&disk), &faults);
        match Store::open_on(volume, model::STRIPE, &previous()) {
            Ok(store) => drop(store),
            Err(error) => {
                failed += 1;
                let wrong = matches!(error, Error::Storage(_) | Error::Corrupt { .. });
                assert!(wrong, "seed {seed}: {error}");
            }
        }
        let again = opened(slice::from_ref(&disk), &previous());
        // `Existing::Previous` writes a mark when it goes back to the previous commit. The device may have written this
        // mark, although it reported an error for this write or for a later operation.
        let gone_back = again.as_ref().is_err_and(|why| why.contains("one commit and none before it"));
        assert!(gone_back || again == Ok(2), "seed {seed}: {again:?}");
        assert_eq!(opened(slice::from_ref(&disk), &newest()), Ok(2), "seed {seed}");
    }
    assert!(failed > 20, "{failed}");
}

#[test]
fn a_root_that_cannot_be_read_counts_as_damaged() {
    // The first requests read the label, root 0 and root 1. With some seeds, only the read of the older root fails.
    let mut opened_previous = 0;
    for seed in 0..model::many(200, 60) {
        let disk = trained(3, false);
        let faults = Faults { seed, errors: vec![(Action::Read, model::EIO, 40)], ..Faults::default() };
        let volume = model::volume(slice::from_ref(&disk), &faults);
        if let Ok(store) = Store::open_on(volume, model::STRIPE, &previous()) {
            let step = store.info().step;
            opened_previous += u32::from(step == 3);
            drop(store);
            assert_eq!(opened(slice::from_ref(&disk), &newest()), Ok(step), "seed {seed}");
        }
    }
    assert!(opened_previous > 0, "no seed failed the read of the older root alone");
}

#[test]
fn previous_rejects_a_commit_of_an_unclosed_run() {
    let mut how = model::how();
    how.durability = Durability::None;
    let disks = model::disks(1);
    let store = model::created_as(&disks, &how);
    (0..=2).for_each(|step| ok(commit(&store, step)));
    // The root of step 1 says that the store was not closed. Step 2 was committed in memory, and it has overwritten
    // extents of step 0.
    assert!(matches!(error_of(&disks[0], &newest()), Error::Refused { .. }));
    assert!(matches!(error_of(&disks[0], &previous()), Error::Corrupt { .. }));
    ok(commit(&store, 3));
    ok(store.close(Wait::forever()));
    drop(store);
    assert_eq!(opened(&disks, &newest()), Ok(3));
    let refused = error_of(&disks[0], &previous());
    assert!(refused.to_string().contains("was never closed"), "{refused}");
    assert_eq!(opened(&disks, &newest()), Ok(3));
}

#[test]
fn both_commits_are_examined_and_nothing_is_written() {
    let examined = |disk: &SimDisk| {
        let before = disk.bytes();
        let volume = model::volume(slice::from_ref(disk), &Faults::default());
        let (mut last, mut all) = (0, 0);
        let found = Store::examine_on(volume, model::STRIPE, &newest(), &mut |done, of| {
            assert!(done >= last && done <= of, "{done} of {of} after {last}");
            (last, all) = (done, of);
            true
        });
        assert!(disk.bytes() == before, "the examination changed the device");
        assert_eq!(last, all);
        ok(found)
    };
    let said = |disk: &SimDisk| -> Vec<_> {
        examined(disk)
            .into_iter()
            .map(|one| (one.generation, one.step, one.damages.len() as u64 + one.others))
            .collect()
    };
    assert_eq!(said(&trained(0, false)), [(Some(1), Some(0), 0)]);
    assert_eq!(said(&trained(3, false)), [(Some(4), Some(3), 0), (Some(3), Some(2), 0)]);
    // The next step had staged one record, with 3 extents of values and 3 extents of state.
    assert_eq!(said(&trained(3, true)), [(Some(4), Some(3), 0), (Some(3), Some(2), 6)]);
    let disk = trained(3, false);
    damage_root(&disk, pages(3).0);
    assert_eq!(said(&disk), [(None, None, 1), (Some(3), Some(2), 0)]);
    let disk = trained(3, false);
    disk.flip(tables(&disk)[0].start + 5, 4);
    assert_eq!(said(&disk), [(Some(4), None, 1), (Some(3), Some(2), 0)]);
    let text = examined(&disk)[0].damages[0].to_string();
    assert!(text.contains("page 0 of the table"), "{text}");
}

#[test]
fn goes_back_later_keeps_the_newest_commit_until_go_back() {
    let disk = trained(3, false);
    let before = disk.bytes();
    let mut how = previous();
    how.goes_back_later = true;
    let disks = [disk.clone()];
    for gives_up in [false, true] {
        let store = ok(model::open(&disks, &how));
        assert_eq!(check(&store, "before going back"), 2);
        let refused = store.begin(0, 3, Wait::forever());
        assert!(matches!(refused, Err(Error::Usage(_))), "{refused:?}");
        if gives_up {
            ok(store.go_back());
            ok(commit(&store, 3));
        }
        ok(store.close(Wait::forever()));
        drop(store);
        assert!(gives_up || disk.bytes() == before, "an opening without `go_back` changed the device");
        assert_eq!(opened(&disks, &newest()), Ok(3));
    }
}
