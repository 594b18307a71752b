//! Simulates devices with faults: short transfers, delays, reordering, errors, torn writes, power loss.
//!
//! Tests use simulated devices for faults that no real device produces on demand, and to see which unflushed writes
//! survive a power loss. Simulated and real volumes share all code above the backend. One seed yields one sequence of
//! decisions. The caller's timing determines to which request each decision applies.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::Duration,
};

use memascend_mem::{Guarded, locked};

use crate::{
    Action, BackendKind, DeviceInfo, DeviceKind, Error, Options, Result, Volume,
    align::Alignment,
    backend::Backend,
    operation::{Address, Context, Kind},
    request::{Job, Jobs, NextStep, PAUSE, Request},
    stripe::Striping,
    volume::Parts,
};

/// The size of a sector in bytes. After a power loss, each sector of an unflushed write is either present or missing.
pub const SECTOR_BYTES: usize = 512;

/// A small pseudo-random generator (`SplitMix64`).
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Makes a generator from a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `bound`, which must not be 0.
    #[expect(clippy::cast_possible_truncation, reason = "below a usize")]
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// Returns true with a probability of `per_mille` in 1,000.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        self.bits() % 1000 < u64::from(per_mille)
    }
}

/// The faults of a simulated device. Frequencies are per 1,000 requests.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Seed of all decisions.
    pub seed: u64,
    /// Frequency of transfers that move only a part of their bytes.
    pub short: u32,
    /// Frequency of temporary failures: EINTR, EAGAIN, ENOMEM.
    pub temporary: u32,
    /// Errors as (action, error number, frequency). A write that fails may have written a part of its bytes.
    pub errors: Vec<(Action, i32, u32)>,
    /// The longest delay of an answer; each delay is random.
    pub delay: Duration,
    /// If true, the device answers requests in random order.
    pub reorder: bool,
    /// The power fails after this many requests, not counting temporary failures: each later request fails with ENXIO,
    /// or with a temporary failure, and has no effect.
    pub dies_after: Option<u64>,
}

/// A device in memory. Clones refer to the same device.
#[derive(Debug, Clone)]
pub struct SimDisk {
    state: Arc<Mutex<Medium>>,
}

#[derive(Debug)]
struct Medium {
    /// The bytes that a read returns.
    cached: Vec<u8>,
    /// The bytes that survive a power loss for certain.
    durable: Vec<u8>,
    /// Writes since the last flush, as (offset, bytes), in the order in which the device executed them.
    unflushed: Vec<(usize, Vec<u8>)>,
    /// Operations that reached the backend of the device's volume, as (action, offset in the volume), in this order.
    operations: Vec<(Action, u64)>,
}

impl SimDisk {
    /// Makes a device of `nbytes` zeros.
    #[must_use]
    pub fn new(nbytes: usize) -> Self {
        Self::of(vec![0; nbytes])
    }

    /// Makes a device that holds `bytes`.
    #[must_use]
    pub fn of(bytes: Vec<u8>) -> Self {
        let medium = Medium { cached: bytes.clone(), durable: bytes, unflushed: Vec::new(), operations: Vec::new() };
        Self { state: Arc::new(Mutex::new(medium)) }
    }

    /// Returns the bytes that a read returns at present.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        locked(&self.state).cached.clone()
    }

    /// Returns the operations that have reached the backend of the device's volume, as (action, offset in the volume),
    /// in this order. Parts of an operation and transfers of the copy threads count as operations.
    #[must_use]
    pub fn operations(&self) -> Vec<(Action, u64)> {
        locked(&self.state).operations.clone()
    }

    /// Flips the bits of `mask` in the byte at `offset`, as a fault of the medium would. `operations` does not list
    /// this change.
    pub fn flip(&self, offset: usize, mask: u8) {
        let mut medium = locked(&self.state);
        medium.cached[offset] ^= mask;
        medium.durable[offset] ^= mask;
    }

    /// Returns the device after a power loss at this moment: each write since the last flush, except a durable write,
    /// may be present, missing or torn, independently of the other writes.
    #[must_use]
    pub fn after_power_loss(&self, seed: u64) -> Self {
        let medium = locked(&self.state);
        let mut rng = Rng::new(seed);
        let mut bytes = medium.durable.clone();
        for (offset, written) in &medium.unflushed {
            let (lost, torn) = (rng.chance(400), rng.chance(300));
            for (index, sector) in written.chunks(SECTOR_BYTES).enumerate() {
                let gone = lost || torn && rng.chance(500);
                if !gone {
                    let at = offset + index * SECTOR_BYTES;
                    bytes[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        Self::of(bytes)
    }

    fn len(&self) -> usize {
        locked(&self.state).cached.len()
    }
}

/// Opens simulated devices as one volume. Ignores `options.backend` and `options.private`.
pub fn open(disks: &[SimDisk], faults: &Faults, options: &Options) -> Result<Volume> {
    let (queue_depth, stripe_bytes) = options.checked()?;
    let smallest = disks.iter().map(SimDisk::len).min().unwrap_or(0);
    let striping = Striping::new(disks.len().max(1), stripe_bytes);
    let alignment = Alignment { memory: SECTOR_BYTES, block: SECTOR_BYTES };
    let capacity = striping.volume_bytes(smallest as u64, SECTOR_BYTES as u64);
    if capacity == 0 || options.size_bytes.is_some_and(|size| size > capacity) {
        return Err(Error::Invalid(format!(
            "the simulated devices have {capacity} bytes; choose a smaller size, or pass larger devices"
        )));
    }
    let names: Vec<PathBuf> = (0..disks.len()).map(|index| format!("simulated-{index}").into()).collect();
    let context = Context::new(names.iter().map(|name| Arc::from(name.as_path())).collect(), striping, alignment);
    let describe = |(name, disk): (&PathBuf, &SimDisk)| DeviceInfo {
        path: Path::new(name).to_owned(),
        kind: DeviceKind::Simulated,
        bytes: disk.len() as u64,
        why_buffered: None,
    };
    let parts = Parts {
        devices: names.iter().zip(disks).map(describe).collect(),
        size_bytes: options.size_bytes.unwrap_or(capacity),
        queue_depth,
        kind: BackendKind::Simulated,
        why_not: None,
    };
    let backend: Arc<dyn Backend> = Arc::new(Sim::start(disks, faults, queue_depth * disks.len())?);
    Ok(Volume::over(context, backend, None, parts))
}

struct Sim {
    disks: Vec<SimDisk>,
    inbox: Arc<Guarded<(Jobs, bool)>>,
    thread: Option<JoinHandle<()>>,
}

struct Driver {
    disks: Vec<SimDisk>,
    faults: Faults,
    rng: Rng,
    depth: usize,
    answered: u64,
}

impl Sim {
    fn start(disks: &[SimDisk], faults: &Faults, depth: usize) -> Result<Self> {
        let inbox = Arc::new(Guarded::default());
        let mut driver =
            Driver { disks: disks.to_vec(), faults: faults.clone(), rng: Rng::new(faults.seed), depth, answered: 0 };
        let theirs = Arc::clone(&inbox);
        let thread = std::thread::Builder::new()
            .name("memascend-sim".into())
            .spawn(move || driver.serve(&theirs))
            .map_err(|error| Error::Invalid(format!("the simulation thread could not be started: {error}")))?;
        Ok(Self { disks: disks.to_vec(), inbox, thread: Some(thread) })
    }
}

impl Backend for Sim {
    fn submit(&self, job: Job) {
        let began = (job.operation.kind.action(), job.operation.offset);
        self.disks.iter().for_each(|disk| locked(&disk.state).operations.push(began));
        self.inbox.lock().0.push(job);
        self.inbox.notify_one();
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        self.inbox.lock().1 = true;
        self.inbox.notify_one();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

impl Driver {
    fn serve(&mut self, inbox: &Guarded<(Jobs, bool)>) {
        let mut requests: Vec<Request> = Vec::new();
        loop {
            let mut state = inbox.lock();
            while requests.len() < self.depth {
                match state.0.next_request() {
                    Some(request) => requests.push(request),
                    None if !requests.is_empty() => break,
                    None if state.1 => return,
                    None => state = inbox.sleep(state),
                }
            }
            drop(state);
            let next = if self.faults.reorder { self.rng.below(requests.len()) } else { 0 };
            let mut request = requests.remove(next);
            self.delay();
            if let NextStep::Again { pause } = request.interpret_result(self.answer(&request)) {
                if pause {
                    std::thread::sleep(PAUSE);
                }
                requests.push(request);
            }
        }
    }

    fn delay(&mut self) {
        let most = usize::try_from(self.faults.delay.as_nanos()).unwrap_or(usize::MAX);
        if most > 0 {
            std::thread::sleep(Duration::from_nanos(self.rng.below(most) as u64));
        }
    }

    fn answer(&mut self, request: &Request) -> std::result::Result<usize, i32> {
        if self.rng.chance(self.faults.temporary) {
            return Err([libc::EINTR, libc::EAGAIN, libc::ENOMEM][self.rng.below(3)]);
        }
        self.answered += 1;
        if self.faults.dies_after.is_some_and(|after| self.answered > after) {
            return Err(libc::ENXIO);
        }
        let action = request.kind.action();
        let failing = |&&(on, _, per_mille): &&(Action, i32, u32)| on == action && self.rng.chance(per_mille);
        let error = self.faults.errors.iter().find(failing).map(|(_, errno, _)| *errno);
        let sectors = request.bytes / SECTOR_BYTES;
        let short = self.rng.chance(self.faults.short) && sectors > 1;
        let moved = if short || error.is_some() {
            // Moves at least one byte, but not all bytes. The transfer may end inside a sector.
            1 + self.rng.below(request.bytes.max(2) - 1)
        } else {
            request.bytes
        };
        self.perform(request, moved);
        error.map_or(Ok(moved), Err)
    }

    fn perform(&self, request: &Request, moved: usize) {
        let mut guard = locked(&self.disks[request.device].state);
        let medium = &mut *guard;
        let Address(memory) = request.address;
        let at = usize::try_from(request.offset).unwrap_or(usize::MAX);
        match request.kind {
            Kind::Read => {
                let from = &medium.cached[at..at + moved];
                // SAFETY: the operation owns `request.bytes` writable bytes at `address`, and `moved` is at most
                // `request.bytes`.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), memory, moved) };
            }
            Kind::Write { durable } => {
                // SAFETY: the operation owns `request.bytes` readable bytes at `address`, and `moved` is at most
                // `request.bytes`.
                let bytes = unsafe { std::slice::from_raw_parts(memory, moved) }.to_vec();
                medium.cached[at..at + moved].copy_from_slice(&bytes);
                if durable {
                    medium.durable[at..at + moved].copy_from_slice(&bytes);
                }
                medium.unflushed.push((at, bytes));
            }
            Kind::Flush => {
                medium.durable.copy_from_slice(&medium.cached);
                medium.unflushed.clear();
            }
        }
    }
}
