//! Tests lanes. Requests of the first lane must overtake requests of the second lane. In both lanes, reads must return
//! the bytes that were written.

use std::time::Duration;

use memascend_mem::{ChunkRing, Lease, OnFork, Pin, Region, Wait};
use memascend_nvme::{
    BackendChoice, Lane, Options, Volume,
    sim::{self, Faults, Rng, SimDisk},
};

const BLOCK: usize = 1 << 20;
const WRITES: usize = 48;

/// Returns `count` aligned buffers of `BLOCK` bytes each.
fn rooms(count: usize) -> Vec<Lease> {
    let region = Region::new(count * BLOCK, Pin::Off, OnFork::Wipe, "a test").unwrap_or_else(|error| panic!("{error}"));
    let ring = ChunkRing::new(&region, BLOCK, count).unwrap_or_else(|error| panic!("{error}"));
    let owner = ring.owner("test").unwrap_or_else(|error| panic!("{error}"));
    (0..count).map(|_| ring.lease(owner, Wait::never()).unwrap_or_else(|error| panic!("{error}"))).collect()
}

fn number(block: usize) -> u8 {
    u8::try_from(block).unwrap_or(u8::MAX)
}

/// Queues writes, then a read in `lane`. Returns the number of writes that were still unfinished when the read ended.
fn overtaken(volume: &Volume, lane: Lane) -> usize {
    let mut rooms = rooms(WRITES + 1);
    let into = rooms.pop().unwrap_or_else(|| panic!("there is room"));
    let mut writes = Vec::new();
    for (index, mut room) in rooms.into_iter().enumerate() {
        room.as_mut_slice().fill(number(index));
        let ticket = volume.write(room, ((index + 1) * BLOCK) as u64);
        writes.push(ticket.unwrap_or_else(|refused| panic!("{}", refused.error)));
    }
    let read = volume.read_in(lane, into, 0).unwrap_or_else(|refused| panic!("{}", refused.error)).wait();
    let open = writes.iter().filter(|write| !write.is_done()).count();
    read.result.unwrap_or_else(|error| panic!("{error}"));
    for write in writes {
        write.wait().result.unwrap_or_else(|error| panic!("{error}"));
    }
    open
}

/// Checks that only reads of the first lane overtake queued writes. `volume` must have a queue depth of 1.
fn check(volume: &Volume) {
    assert_eq!(overtaken(volume, Lane::Second), 0);
    // Tries ten times, because the scheduler may suspend this thread between the end of the read and the count of the
    // writes.
    let most = (0..10).map(|_| overtaken(volume, Lane::First)).max();
    assert!(most > Some(WRITES / 2), "a read of the first lane overtook {most:?} of {WRITES} writes");
}

fn depth_of_one() -> Options {
    let mut options = Options::default();
    options.queue_depth = Some(1);
    options
}

#[test]
fn first_lane_read_overtakes_queued_writes_of_a_file() {
    for backend in [BackendChoice::Auto, BackendChoice::Threads] {
        let name = format!("memascend-nvme-lanes-{}-{backend:?}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let mut options = depth_of_one();
        options.size_bytes = Some(((WRITES + 1) * BLOCK) as u64);
        options.backend = backend;
        let volume = Volume::open(&[&path], &options).unwrap_or_else(|error| panic!("{error}"));
        check(&volume);
        let mut buffer = vec![0; BLOCK];
        for index in 0..WRITES {
            let read = volume.read(buffer, ((index + 1) * BLOCK) as u64);
            buffer = read.unwrap_or_else(|refused| panic!("{}", refused.error)).wait().buffer;
            assert!(buffer.iter().all(|&byte| byte == number(index)), "block {index} by {backend:?}");
        }
        drop(volume);
        std::fs::remove_file(path).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn first_lane_read_overtakes_queued_writes_of_a_simulated_device() {
    let faults = Faults { delay: Duration::from_micros(300), ..Faults::default() };
    let disk = SimDisk::new((WRITES + 1) * BLOCK);
    check(&sim::open(&[disk], &faults, &depth_of_one()).unwrap_or_else(|error| panic!("{error}")));
}

#[test]
fn reads_return_the_written_bytes_in_both_lanes() {
    const PLACES: usize = 64;
    const BYTES: usize = 6000;
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let faults = Faults { seed, short: 200, temporary: 100, reorder: seed % 2 == 0, ..Faults::default() };
        let mut options = Options::default();
        options.queue_depth = Some(1 + rng.below(3));
        options.stripe_bytes = Some(8192);
        let disks: Vec<SimDisk> = (0..=seed % 3).map(|_| SimDisk::new(PLACES * BYTES + 8192)).collect();
        let volume = sim::open(&disks, &faults, &options).unwrap_or_else(|error| panic!("{error}"));
        let mut model = [0_u8; PLACES];
        for _ in 0..20 {
            // A round either writes or reads a place. It cannot do both, because all operations of the round may be in
            // flight at once.
            let (mut writes, mut reads) = (Vec::new(), Vec::new());
            for (place, byte) in model.iter_mut().enumerate() {
                let at = (place * BYTES) as u64;
                if rng.chance(400) {
                    *byte = u8::try_from(rng.below(256)).unwrap_or(0);
                    let write = volume.write(vec![*byte; BYTES], at);
                    writes.push(write.unwrap_or_else(|refused| panic!("{}", refused.error)));
                } else {
                    let lane = if rng.chance(500) { Lane::First } else { Lane::Second };
                    let read = volume.read_in(lane, vec![1; BYTES], at);
                    reads.push((read.unwrap_or_else(|refused| panic!("{}", refused.error)), *byte));
                }
            }
            for (read, byte) in reads {
                let read = read.wait();
                read.result.unwrap_or_else(|error| panic!("{error}"));
                assert!(read.buffer == vec![byte; BYTES], "seed {seed}");
            }
            for write in writes {
                write.wait().result.unwrap_or_else(|error| panic!("{error}"));
            }
        }
        assert_eq!(volume.stats().failed, 0);
    }
}
