//! Tests volumes on simulated devices that fail, delay, shorten and reorder requests, and that lose power. Random
//! operations must give the same results as on a plain array of bytes.

use std::{collections::HashSet, sync::Arc, time::Duration};

use memascend_mem::Wait;
use memascend_nvme::{
    Action, Error, Options, Volume,
    sim::{self, Faults, Rng, SimDisk},
};
use proptest::prelude::*;

const DISK_BYTES: usize = 1 << 20;
const ERRNOS: [i32; 7] = [libc::ENOSPC, libc::EIO, libc::EFBIG, libc::EROFS, libc::ENODEV, libc::ENXIO, libc::EPERM];

fn opened(disks: &[SimDisk], faults: &Faults) -> Volume {
    let mut options = Options::default();
    options.stripe_bytes = Some(8192);
    sim::open(disks, faults, &options).unwrap_or_else(|error| panic!("{error}"))
}

fn everything(volume: &Volume) -> Vec<u8> {
    let size = usize::try_from(volume.size_bytes()).unwrap_or(0);
    let read = volume.read(vec![0; size], 0).unwrap_or_else(|refused| panic!("{}", refused.error)).wait();
    assert_eq!(read.result.unwrap_or_else(|error| panic!("{error}")), size);
    read.buffer
}

/// Returns a random offset and a random length. Most lengths are small and unaligned, and some are large. About a third
/// of the offsets are multiples of 512.
fn place(rng: &mut Rng, size: usize) -> (usize, usize) {
    let most = [40, 700, 5000, 300_000][rng.below(4)].min(size);
    let nbytes = rng.below(most);
    let mut offset = rng.below(size - nbytes);
    if rng.chance(300) {
        offset = offset / 512 * 512;
    }
    (offset, nbytes)
}

#[test]
fn random_operations_agree_with_a_plain_array() {
    for seed in 0..30 {
        let faults = Faults {
            seed,
            short: 300,
            temporary: 200,
            delay: Duration::from_micros(if seed % 3 == 0 { 200 } else { 0 }),
            reorder: true,
            ..Faults::default()
        };
        let disks: Vec<SimDisk> = (0..=seed % 3).map(|_| SimDisk::new(DISK_BYTES)).collect();
        let volume = opened(&disks, &faults);
        let size = usize::try_from(volume.size_bytes()).unwrap_or(0);
        let mut model = vec![0_u8; size];
        let mut rng = Rng::new(seed ^ 0xabcd);
        for _ in 0..25 {
            // Begins a batch of writes to disjoint bytes. All writes may be in flight at once. The test drops the
            // tickets of some writes.
            let mut taken: Vec<(usize, usize)> = Vec::new();
            let mut tickets = Vec::new();
            for _ in 0..rng.below(12) {
                let (offset, nbytes) = place(&mut rng, size);
                if taken.iter().any(|&(at, len)| at < offset + nbytes && offset < at + len) {
                    continue;
                }
                taken.push((offset, nbytes));
                let bytes: Vec<u8> = (0..nbytes).map(|_| u8::try_from(rng.below(256)).unwrap_or(0)).collect();
                model[offset..offset + nbytes].copy_from_slice(&bytes);
                let ticket = volume.write(bytes, offset as u64).unwrap_or_else(|refused| panic!("{}", refused.error));
                if rng.chance(700) {
                    tickets.push((nbytes, ticket));
                }
            }
            for (nbytes, ticket) in tickets {
                assert_eq!(ticket.wait().result.unwrap_or_else(|error| panic!("{error}")), nbytes);
            }
            volume.flush(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
            let (offset, nbytes) = place(&mut rng, size);
            let read =
                volume.read(vec![1; nbytes], offset as u64).unwrap_or_else(|refused| panic!("{}", refused.error));
            let read = read.wait();
            assert_eq!(read.result.unwrap_or_else(|error| panic!("{error}")), nbytes);
            assert!(read.buffer == model[offset..offset + nbytes], "seed {seed}, {nbytes} bytes at {offset}");
        }
        assert!(everything(&volume) == model, "seed {seed}");
        let stats = volume.stats();
        assert!(stats.continued > 0 && stats.retried > 0 && stats.bounced_bytes > 0, "{stats:?}");
        assert_eq!((stats.failed, stats.in_flight), (0, 0));
        volume.close(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn concurrent_writes_in_one_block_keep_each_others_bytes() {
    let faults = Faults { reorder: true, delay: Duration::from_micros(50), ..Faults::default() };
    let volume = Arc::new(opened(&[SimDisk::new(DISK_BYTES)], &faults));
    // Starts 16 threads. Each thread writes every 16th run of 29 bytes, so neighbouring runs belong to different
    // threads.
    std::thread::scope(|scope| {
        for thread in 0..16_u8 {
            let volume = &volume;
            scope.spawn(move || {
                for round in 0..30_u64 {
                    let offset = (round * 16 + u64::from(thread)) * 29;
                    let ticket = volume.write(vec![thread + 1; 29], offset);
                    drop(ticket.unwrap_or_else(|refused| panic!("{}", refused.error)));
                }
            });
        }
    });
    volume.flush(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
    let bytes = everything(&volume);
    for (index, byte) in bytes[..30 * 16 * 29].iter().enumerate() {
        assert_eq!(usize::from(*byte), index / 29 % 16 + 1, "byte {index}");
    }
}

#[test]
fn overlapping_writes_leave_no_former_bytes() {
    // After two overlapping writes, each byte must come from one of these two writes. No byte may keep its former
    // value.
    for seed in 0..200 {
        let faults = Faults { seed, reorder: true, delay: Duration::from_micros(20), ..Faults::default() };
        let volume = opened(&[SimDisk::new(8192)], &faults);
        let aligned = memascend_mem::Region::new(8192, memascend_mem::Pin::Off, memascend_mem::OnFork::Copy, "test")
            .and_then(|region| memascend_mem::ChunkRing::new(&region, 4096, 2))
            .unwrap_or_else(|error| panic!("{error}"));
        let owner = aligned.owner("test").unwrap_or_else(|error| panic!("{error}"));
        let mut lease = aligned.lease(owner, Wait::never()).unwrap_or_else(|error| panic!("{error}"));
        lease.as_mut_slice().fill(1);
        let part = volume.write(vec![2; 100], 700).unwrap_or_else(|refused| panic!("{}", refused.error));
        let whole = volume.write(lease, 0).unwrap_or_else(|refused| panic!("{}", refused.error));
        assert!(part.wait().result.is_ok() && whole.wait().result.is_ok());
        let bytes = everything(&volume);
        for (index, byte) in bytes[..4096].iter().enumerate() {
            let inside = (700..800).contains(&index);
            assert!(*byte == 1 || inside && *byte == 2, "seed {seed}: byte {index} is {byte}");
        }
    }
}

#[test]
fn device_error_fails_only_its_own_ticket() {
    for (index, errno) in ERRNOS.into_iter().enumerate() {
        for action in [Action::Read, Action::Write] {
            let faults = Faults {
                seed: index as u64,
                short: 100,
                errors: vec![(action, errno, 300)],
                reorder: true,
                ..Faults::default()
            };
            let volume = opened(&[SimDisk::new(DISK_BYTES), SimDisk::new(DISK_BYTES)], &faults);
            let (mut failed, mut fine) = (0, 0);
            let mut sent = Vec::new();
            for number in 0..60_u64 {
                let ticket = if action == Action::Read {
                    volume.read(vec![0; 6000], number * 7000)
                } else {
                    volume.write(vec![1; 6000], number * 7000)
                };
                sent.push(ticket.unwrap_or_else(|refused| panic!("{}", refused.error)));
            }
            for ticket in sent {
                let finished = ticket.wait();
                assert_eq!(finished.buffer.len(), 6000, "the ticket must return the buffer");
                match finished.result {
                    Ok(6000) => fine += 1,
                    Err(Error::Device { errno: got, path, nbytes, action: on, .. }) => {
                        assert_eq!(got, errno);
                        assert!(path.to_string_lossy().starts_with("simulated-") && nbytes > 0 && on == action);
                        failed += 1;
                    }
                    other => panic!("{other:?}"),
                }
            }
            assert!(failed > 0 && fine > 0, "{failed} failed, {fine} fine");
            assert_eq!(volume.stats().failed, failed);
            assert!(volume.flush(Wait::forever()).is_ok(), "each ticket reported its error");
        }
    }
}

#[test]
fn flush_fails_forever_after_one_failed_flush() {
    let mut failed = 0;
    for seed in 0..20 {
        // The device fails half of its flushes. After the first failed flush, the volume must report an error for every
        // later flush, although the device could complete some of them.
        let faults = Faults { seed, errors: vec![(Action::Flush, libc::EIO, 500)], ..Faults::default() };
        let volume = opened(&[SimDisk::new(DISK_BYTES)], &faults);
        let errors: Vec<_> = (0..10).map(|_| volume.flush(Wait::forever()).err()).collect();
        let whole = errors.iter().take_while(|error| error.is_none()).count();
        for error in &errors[whole..] {
            assert!(
                matches!(error, Some(Error::Device { action: Action::Flush, errno: libc::EIO, .. })),
                "seed {seed}: {error:?}"
            );
            failed += 1;
        }
        let written = volume.write(vec![1; 10], 0).unwrap_or_else(|refused| panic!("{}", refused.error)).wait();
        assert!(written.result.is_ok(), "the volume must still accept writes");
        assert_eq!(volume.stats().flushes, whole as u64);
    }
    assert!(failed > 100, "{failed} of 200 flushes failed");
}

#[test]
fn failed_durable_write_fails_all_later_flushes() {
    let faults = Faults { errors: vec![(Action::Write, libc::EIO, 1000)], ..Faults::default() };
    let volume = opened(&[SimDisk::new(DISK_BYTES)], &faults);
    let durable = volume.write_durable(vec![1; 4096], 0).unwrap_or_else(|refused| panic!("{}", refused.error));
    assert!(durable.wait().result.is_err());
    assert!(
        (0..2).all(|_| volume.flush(Wait::forever()).is_err()),
        "each later flush must fail: the device may have dropped other writes, too"
    );
}

#[test]
fn error_of_a_dropped_write_is_returned_once_by_flush_or_close() {
    let faults = Faults { errors: vec![(Action::Write, libc::ENOSPC, 1000)], ..Faults::default() };
    for by_close in [false, true] {
        let volume = opened(&[SimDisk::new(DISK_BYTES)], &faults);
        drop(volume.write(vec![1; 512], 512));
        let tell = || if by_close { volume.close(Wait::forever()) } else { volume.flush(Wait::forever()) };
        let error = tell().err();
        assert!(matches!(error, Some(Error::Device { errno: libc::ENOSPC, .. })), "{error:?}");
        assert!(tell().is_ok());
    }
}

#[test]
fn power_loss_keeps_flushed_and_durable_writes_and_may_lose_others() {
    let mut seen = HashSet::new();
    for seed in 0..60 {
        let disk = SimDisk::new(8192);
        let volume = opened(std::slice::from_ref(&disk), &Faults { seed, ..Faults::default() });
        let write = |byte: u8, offset| {
            volume.write(vec![byte; 2048], offset).unwrap_or_else(|refused| panic!("{}", refused.error)).wait().result
        };
        assert!(write(1, 0).is_ok());
        volume.flush(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
        assert!(write(2, 4096).is_ok());
        let durable = volume.write_durable(vec![3; 100], 7000).unwrap_or_else(|refused| panic!("{}", refused.error));
        assert!(durable.wait().result.is_ok());
        let after = disk.after_power_loss(seed).bytes();
        assert!(after[..2048].iter().all(|byte| *byte == 1));
        assert!(after[7000..7100].iter().all(|byte| *byte == 3));
        seen.insert(after[4096..6144].iter().map(|byte| usize::from(*byte == 2)).sum::<usize>());
    }
    assert!(seen.contains(&0_usize) && seen.contains(&2048) && seen.len() > 2, "lost, whole and torn: {seen:?}");
}

#[test]
fn flush_reaches_every_device() {
    for seed in 0..20 {
        let disks: Vec<SimDisk> = (0..3).map(|_| SimDisk::new(16_384)).collect();
        let volume = opened(&disks, &Faults { seed, ..Faults::default() });
        let write = volume.write(vec![1; 6 * 8192], 0).unwrap_or_else(|refused| panic!("{}", refused.error));
        assert!(write.wait().result.is_ok());
        volume.flush(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
        for (index, disk) in disks.iter().enumerate() {
            let after = disk.after_power_loss(seed).bytes();
            assert!(after.iter().all(|byte| *byte == 1), "device {index}, seed {seed}");
        }
    }
}

#[test]
fn dropped_tickets_and_volume_still_finish_their_writes() {
    let disk = SimDisk::new(DISK_BYTES);
    let faults = Faults { delay: Duration::from_millis(2), reorder: true, ..Faults::default() };
    let volume = opened(std::slice::from_ref(&disk), &faults);
    for index in 0..50_u64 {
        drop(volume.write(vec![9; 1000], index * 1000));
    }
    let kept = volume.write(vec![8; 100], 60_000).unwrap_or_else(|refused| panic!("{}", refused.error));
    drop(volume);
    assert!(disk.bytes()[..50_000].iter().all(|byte| *byte == 9));
    let finished = kept.wait();
    assert!(finished.result.is_ok() && finished.buffer == vec![8; 100]);
}

#[test]
fn read_continues_after_its_wait_timed_out_or_was_interrupted() {
    let faults = Faults { delay: Duration::from_millis(400), seed: 3, ..Faults::default() };
    let volume = opened(&[SimDisk::new(DISK_BYTES)], &faults);
    let ticket = volume.read(vec![1; 64], 0).unwrap_or_else(|refused| panic!("{}", refused.error));
    let error = ticket.wait_until(Wait::at_most(Duration::from_millis(1))).err();
    assert!(matches!(error, Some(Error::TimedOut { .. })), "{error:?}");
    assert!(ticket.outcome().is_none() && ticket.take_buffer().is_none());
    let mut never = || false;
    let error = ticket.wait_until(Wait { timeout: None, keep_waiting: Some(&mut never) }).err();
    assert!(matches!(error, Some(Error::Interrupted { .. })), "{error:?}");
    assert_eq!(ticket.wait().buffer, vec![0; 64]);
}

#[test]
fn operations_past_the_end_or_after_close_are_rejected() {
    let volume = opened(&[SimDisk::new(8192)], &Faults::default());
    for (offset, nbytes) in [(8192, 1), (0, 8193), (u64::MAX, 1), (u64::MAX - 4, 8)] {
        let refused = volume.write(vec![5; nbytes], offset).err().unwrap_or_else(|| panic!("{offset} {nbytes}"));
        assert!(matches!(refused.error, Error::PastTheEnd { .. }));
        assert_eq!(refused.buffer.len(), nbytes, "a rejected write must return the buffer");
    }
    assert_eq!(volume.write(Vec::new(), 8192).unwrap_or_else(|_| panic!("empty")).wait().result.ok(), Some(0));
    assert!(everything(&volume).iter().all(|byte| *byte == 0));
    volume.close(Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
    assert!(matches!(volume.read(vec![0; 1], 0).err().map(|refused| refused.error), Some(Error::Closed)));
    assert!(matches!(volume.flush(Wait::forever()), Err(Error::Closed)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn one_write_changes_its_bytes_and_no_others(
        seed: u64,
        offset in 0_usize..30_000,
        nbytes in 0_usize..30_000,
        devices in 1_usize..4,
    ) {
        let faults = Faults { seed, short: 400, temporary: 200, reorder: true, ..Faults::default() };
        let disks: Vec<SimDisk> = (0..devices).map(|_| SimDisk::new(65_536)).collect();
        let volume = opened(&disks, &faults);
        let size = usize::try_from(volume.size_bytes()).unwrap_or(0);
        prop_assert!(volume.write(vec![7; size], 0).is_ok_and(|ticket| ticket.wait().result.is_ok()));
        prop_assert!(volume.write(vec![9; nbytes], offset as u64).is_ok_and(|ticket| ticket.wait().result.is_ok()));
        for (index, byte) in everything(&volume).into_iter().enumerate() {
            let expected = if (offset..offset + nbytes).contains(&index) { 9 } else { 7 };
            prop_assert_eq!(byte, expected, "byte {}", index);
        }
    }
}
