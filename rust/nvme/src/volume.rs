//! Volumes: one address space over one or several devices.

use std::{
    any::Any,
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use memascend_mem::{Wait, locked};

use crate::{
    BackendKind, Buffer, DeviceKind, Error, Lane, Lost, NotBegun, Result, Ticket, VolumeStats,
    backend::Backend,
    device::Device,
    operation::{Address, Context, Kind, Operation},
    request::Job,
    traffic::{Begun, Hold},
    unaligned::Unaligned,
};

/// A device of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Where it is.
    pub path: PathBuf,
    /// What it is.
    pub kind: DeviceKind,
    /// What it holds.
    pub bytes: u64,
    /// Why its I/O goes through the page cache, if it does.
    pub why_buffered: Option<String>,
}

/// One address space over one or several devices, striped.
///
/// Operations on different bytes never disturb each other, in whatever order and from whatever threads they come, also
/// inside one block. Of operations on the same bytes, a later one that does not wait for the earlier may come first.
///
/// Dropping waits for everything in flight; [`close`](Self::close) does so too and says what failed unheard.
pub struct Volume {
    pub(crate) context: Arc<Context>,
    /// `None` once closed.
    running: RwLock<Option<Running>>,
    devices: Vec<DeviceInfo>,
    size_bytes: AtomicU64,
    queue_depth: usize,
    kind: BackendKind,
    why_not: Option<String>,
}

/// What works for an open volume. Dropped in this order: no copies without a backend, no backend without devices.
struct Running {
    unaligned: Unaligned,
    backend: Arc<dyn Backend>,
    opened: Option<Arc<[Device]>>,
}

/// What a volume knows of itself.
pub(crate) struct Parts {
    pub(crate) devices: Vec<DeviceInfo>,
    pub(crate) size_bytes: u64,
    pub(crate) queue_depth: usize,
    pub(crate) kind: BackendKind,
    pub(crate) why_not: Option<String>,
}

impl Volume {
    /// A volume over whatever backend.
    pub(crate) fn over(
        context: Arc<Context>,
        backend: Arc<dyn Backend>,
        devices: Option<Arc<[Device]>>,
        parts: Parts,
    ) -> Self {
        let Parts { devices: described, size_bytes, queue_depth, kind, why_not } = parts;
        let unaligned = Unaligned::new(&context, &backend);
        let running = RwLock::new(Some(Running { unaligned, backend, opened: devices }));
        let size_bytes = AtomicU64::new(size_bytes);
        Self { context, running, devices: described, size_bytes, queue_depth, kind, why_not }
    }

    /// Lets what was made or grown for it stay. Until then the end of a volume from a [`Claim`] undoes that. A file with a
    /// pending name stays from [`take_name`](Self::take_name) on.
    pub fn keep(&self) {
        self.opened().iter().for_each(Device::keep);
    }

    /// Gives a file with a pending name its own one, for good. Where another file has that by now, this is an error, and
    /// that file is not touched.
    pub fn take_name(&self) -> Result<()> {
        self.opened().iter().try_for_each(Device::take_name)
    }

    /// Whether a file of it has its pending name still.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.opened().iter().any(Device::is_pending)
    }

    /// Its files have no names from here on: the caller removes those.
    pub fn forgo_names(&self) {
        self.opened().iter().for_each(Device::forgo_name);
    }

    /// Files that were made for this volume are removed at its end: they are not wanted any more.
    pub fn forsake(&self) {
        self.opened().iter().for_each(Device::forsake);
    }

    /// The first of its files that its path does not name any more, and what became of it. Always `None` for raw devices,
    /// and once the volume is closed.
    #[must_use]
    pub fn lost(&self) -> Option<(Arc<Path>, Lost)> {
        self.opened().iter().find_map(|device| Some((Arc::clone(&device.path), device.lost()?)))
    }

    fn running(&self) -> RwLockReadGuard<'_, Option<Running>> {
        self.running.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn opened(&self) -> Arc<[Device]> {
        let running = self.running();
        running.as_ref().and_then(|running| running.opened.clone()).unwrap_or_default()
    }

    /// Reads `buffer.len()` bytes from `offset` on.
    pub fn read<B: Buffer>(&self, buffer: B, offset: u64) -> std::result::Result<Ticket<B>, NotBegun<B>> {
        self.read_in(Lane::Second, buffer, offset)
    }

    /// As [`read`](Self::read), in a lane of the caller's choice. Where memory or offset are not aligned, only the
    /// transfers of the device are in that lane, and not the turn among those that copy.
    pub fn read_in<B: Buffer>(
        &self,
        lane: Lane,
        buffer: B,
        offset: u64,
    ) -> std::result::Result<Ticket<B>, NotBegun<B>> {
        self.begin((Kind::Read, lane), buffer, offset)
    }

    /// Writes the buffer to `offset`. Done means that the device has the bytes; [`flush`](Self::flush) makes them last.
    pub fn write<B: Buffer>(&self, buffer: B, offset: u64) -> std::result::Result<Ticket<B>, NotBegun<B>> {
        self.begin((Kind::Write { durable: false }, Lane::Second), buffer, offset)
    }

    /// Writes the buffer to `offset`; done means that these bytes, and what the file system needs to find them, survive
    /// a loss of power. It says nothing about other writes.
    pub fn write_durable<B: Buffer>(&self, buffer: B, offset: u64) -> std::result::Result<Ticket<B>, NotBegun<B>> {
        self.begin((Kind::Write { durable: true }, Lane::Second), buffer, offset)
    }

    /// Makes every write that began before the call survive a loss of power, on every device.
    ///
    /// What it says of a failure stays so: after a failed flush the kernel has dropped what it could not write, and a
    /// second flush would succeed without it. So every later one fails too. A write that failed after its ticket was
    /// dropped is reported here as well, once.
    pub fn flush(&self, mut wait: Wait<'_>) -> Result<()> {
        let context = &self.context;
        context.check_process()?;
        context.traffic.wait_for_writes(&mut wait)?;
        if let Some(error) = locked(&context.flush_failed).clone() {
            return Err(error);
        }
        if let Some(error) = locked(&context.unclaimed).take() {
            return Err(error);
        }
        let operation = {
            let running = self.running();
            let running = running.as_ref().ok_or(Error::Closed)?;
            let begun = context.traffic.begin(false)?;
            let units = context.paths.len() as u64;
            let nowhere = Address(std::ptr::null_mut());
            let operation =
                Operation::new(context, (Kind::Flush, Lane::Second), (0, units), nowhere, (begun, None), None);
            running.backend.submit(Job::new(Arc::clone(&operation)));
            operation
        };
        operation.wait(&mut wait)?;
        operation.outcome().unwrap_or(Err(Error::Closed))
    }

    /// Ends new operations, waits for those in flight, ends the threads and lets go of the devices. Closing again is
    /// fine, also after an interrupted wait. A write that failed after its ticket was dropped is reported here.
    pub fn close(&self, mut wait: Wait<'_>) -> Result<()> {
        self.context.check_process()?;
        self.context.traffic.close();
        self.context.traffic.wait_for_all(&mut wait)?;
        drop(self.running.write().unwrap_or_else(PoisonError::into_inner).take());
        locked(&self.context.unclaimed).take().map_or(Ok(()), Err)
    }

    /// Whether it was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.context.maker.is_elsewhere() || self.running().is_none()
    }

    /// What it holds.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Relaxed)
    }

    /// Grows its files until it holds so many bytes, for good; `false` where that cannot be: a raw device, or a file system
    /// without room. Then the volume is as it was.
    pub fn grow(&self, size_bytes: u64) -> Result<bool> {
        let devices = self.opened();
        let Some(of_device) = self.context.striping.device_bytes(size_bytes, self.context.block_bytes as u64) else {
            return Ok(false);
        };
        if size_bytes <= self.size_bytes() {
            return Ok(true);
        }
        for device in devices.iter() {
            if !device.grow(of_device)? {
                return Ok(false);
            }
        }
        if devices.is_empty() {
            return Ok(false);
        }
        self.size_bytes.fetch_max(size_bytes, Relaxed);
        Ok(true)
    }

    /// What offsets, lengths and addresses must be multiples of to go straight from memory to disk. 1: all do.
    #[must_use]
    pub fn alignment(&self) -> usize {
        self.context.block_bytes.max(self.context.memory_align)
    }

    /// Whether the page cache is bypassed on every device.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.devices.iter().all(|device| device.why_buffered.is_none())
    }

    /// Which backend it has.
    #[must_use]
    pub fn backend(&self) -> BackendKind {
        self.kind
    }

    /// Why it has no better backend.
    #[must_use]
    pub fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// Requests that the kernel has at once, per device.
    #[must_use]
    pub fn queue_depth(&self) -> usize {
        self.queue_depth
    }

    /// Its devices.
    #[must_use]
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    /// Bytes of the memory that transfers go through which are not aligned: none before the first such transfer.
    #[must_use]
    pub fn copy_bytes(&self) -> usize {
        let running = self.running();
        running.as_ref().map_or(0, |running| running.unaligned.bytes())
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> VolumeStats {
        if self.context.maker.is_elsewhere() {
            // In a forked child the locks may have been copied in the middle of a hold.
            return VolumeStats::default();
        }
        VolumeStats { in_flight: self.context.traffic.in_flight() as u64, ..*locked(&self.context.stats) }
    }

    fn begin<B: Buffer>(
        &self,
        what: (Kind, Lane),
        mut buffer: B,
        offset: u64,
    ) -> std::result::Result<Ticket<B>, NotBegun<B>> {
        if let Err(error) = self.context.check_process() {
            return Err(NotBegun { buffer, error });
        }
        let running = self.running();
        let address = Address(match what.0 {
            Kind::Read => buffer.as_mut_ptr().as_ptr(),
            Kind::Write { .. } | Kind::Flush => buffer.as_ptr().cast_mut(),
        });
        match self.prepare(running.as_ref(), what, address, offset, buffer.len()) {
            Err(error) => Err(NotBegun { buffer, error }),
            Ok(prepared) => Ok(Ticket::new(prepared.start(&self.context, Box::new(buffer)))),
        }
    }

    /// Everything that can fail, before anything is begun.
    fn prepare<'a>(
        &self,
        running: Option<&'a Running>,
        (kind, lane): (Kind, Lane),
        address: Address,
        offset: u64,
        nbytes: usize,
    ) -> Result<Prepared<'a>> {
        let context = &self.context;
        let running = running.ok_or(Error::Closed)?;
        let Some(end) = offset.checked_add(nbytes as u64).filter(|end| *end <= self.size_bytes()) else {
            return Err(Error::PastTheEnd { offset, nbytes, size_bytes: self.size_bytes() });
        };
        let whole = offset..end;
        let mut straight = whole_blocks(context, &whole);
        let skipped = usize::try_from(straight.start - whole.start).unwrap_or(usize::MAX);
        if !address.plus(skipped).is_aligned(context.memory_align) {
            straight = whole.end..whole.end;
        }
        if straight != whole {
            running.unaligned.ready()?;
        }
        let begun = context.traffic.begin(kind.writes())?;
        let mut hold = None;
        if kind.writes() && context.block_bytes > 1 && !straight.is_empty() {
            hold = context.traffic.try_hold_shared(&straight);
            if hold.is_none() {
                // One of its blocks is being changed: those that copy wait their turn.
                straight = whole.end..whole.end;
                if let Err(error) = running.unaligned.ready() {
                    context.traffic.end(begun);
                    return Err(error);
                }
            }
        }
        Ok(Prepared { running, kind, lane, address, whole, straight, begun, hold })
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let running = self.running.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.context.maker.is_elsewhere() {
            // The threads, the ring and the operations are the parent's; the descriptors are closed here already.
            std::mem::forget(running);
            return;
        }
        if let Some(running) = running {
            // The kernel may still write to buffers: nothing is let go before it is done with all of them.
            self.context.traffic.close();
            while self.context.traffic.wait_for_all(&mut Wait::forever()).is_err() {}
            drop(running);
        }
    }
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume")
            .field("devices", &self.devices)
            .field("size_bytes", &self.size_bytes())
            .field("backend", &self.kind)
            .finish_non_exhaustive()
    }
}

/// An operation that nothing stands in the way of.
struct Prepared<'a> {
    running: &'a Running,
    kind: Kind,
    lane: Lane,
    address: Address,
    /// The volume's bytes that it moves.
    whole: Range<u64>,
    /// Those of them that go straight between memory and disk: whole blocks. Empty, at the end of `whole`, for none.
    straight: Range<u64>,
    begun: Begun,
    /// On the blocks that a write goes straight to.
    hold: Option<Hold>,
}

impl Prepared<'_> {
    fn start(self, context: &Arc<Context>, buffer: Box<dyn Any + Send>) -> Arc<Operation> {
        let Self { running, kind, lane, address, whole, straight, begun, hold } = self;
        let Running { unaligned, backend, .. } = running;
        let units = whole.end - whole.start;
        let all = straight == whole;
        let own_hold = if all { hold } else { None };
        let operation =
            Operation::new(context, (kind, lane), (whole.start, units), address, (begun, own_hold), Some(buffer));
        if units == 0 {
            operation.finish_empty();
            return operation;
        }
        if all {
            backend.submit(Job::new(Arc::clone(&operation)));
            return operation;
        }
        let edges = [whole.start..straight.start, straight.end..whole.end];
        if !straight.is_empty() {
            backend.submit(Job::new(operation.part(straight, hold)));
        }
        for edge in edges.into_iter().filter(|edge| !edge.is_empty()) {
            unaligned.copy(&operation, edge);
        }
        operation
    }
}

/// The part of `whole` that makes up whole blocks. Empty, at the end of `whole`, where there is none.
fn whole_blocks(context: &Context, whole: &Range<u64>) -> Range<u64> {
    let block = context.block_bytes as u64;
    match (whole.start.checked_next_multiple_of(block), whole.end / block * block) {
        (Some(start), end) if start < end => start..end,
        _ => whole.end..whole.end,
    }
}
