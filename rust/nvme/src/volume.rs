//! A volume: one address space over one or several devices.

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

/// A device of a volume, as it was when the volume was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The path of the device, as the caller passed it.
    pub path: PathBuf,
    /// Whether the device is a file, a raw block device or simulated.
    pub kind: DeviceKind,
    /// The size of the device in bytes.
    pub bytes: u64,
    /// Why I/O on the device goes through the page cache; `None` if the device uses direct I/O.
    pub why_buffered: Option<String>,
}

/// One address space over one device, or striped over several devices.
///
/// Operations on different bytes never disturb each other, in any order and from any threads, even inside one block.
/// Operations on the same bytes may be done in any order: wait for the first operation before you begin the second
/// operation.
///
/// Dropping a volume waits for the operations in flight. [`close`](Self::close) waits too, and reports a failed write
/// whose ticket was dropped before it reported the failure.
pub struct Volume {
    pub(crate) context: Arc<Context>,
    /// `None` once the volume is closed.
    running: RwLock<Option<Running>>,
    devices: Vec<DeviceInfo>,
    size_bytes: AtomicU64,
    queue_depth: usize,
    kind: BackendKind,
    why_not: Option<String>,
}

/// The working parts of an open volume. Rust drops the fields from first to last, and each field uses the next field:
/// `unaligned` uses the backend, and the backend uses the devices.
struct Running {
    unaligned: Unaligned,
    backend: Arc<dyn Backend>,
    opened: Option<Arc<[Device]>>,
}

/// The properties of a volume that are known once it is open.
pub(crate) struct Parts {
    pub(crate) devices: Vec<DeviceInfo>,
    pub(crate) size_bytes: u64,
    pub(crate) queue_depth: usize,
    pub(crate) kind: BackendKind,
    pub(crate) why_not: Option<String>,
}

impl Volume {
    /// Makes a volume over any backend. `devices` is `None` for simulated devices.
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

    /// Keeps the files that were created or grown for this volume. Before `keep`, dropping a volume that was opened
    /// from a [`Claim`](crate::Claim) removes the created files, and restores the length and the permissions of the
    /// other files. A file with a pending name is kept only once [`take_name`](Self::take_name) has renamed it.
    pub fn keep(&self) {
        self.opened().iter().for_each(Device::keep);
    }

    /// Renames files from their pending names to their own names, and keeps the files.
    ///
    /// # Errors
    /// Fails if another file has the name (that file is not changed), if the pending file was deleted, moved or
    /// replaced, or if a system call fails.
    pub fn take_name(&self) -> Result<()> {
        self.opened().iter().try_for_each(Device::take_name)
    }

    /// True if a file of this volume still has its pending name.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.opened().iter().any(Device::is_pending)
    }

    /// Call this before you remove the names of the volume's files. `lost` then ignores these files, and dropping the
    /// volume undoes nothing.
    pub fn forgo_names(&self) {
        self.opened().iter().for_each(Device::forgo_name);
    }

    /// Cancels `keep` for files that were new or empty when the volume was opened: dropping the volume removes the new
    /// files and empties the other files.
    pub fn forsake(&self) {
        self.opened().iter().for_each(Device::forsake);
    }

    /// Returns the first file that lost its name or was truncated, and what happened to it. Returns `None` if all files
    /// are intact, if the devices are raw, or if the volume is closed.
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

    /// Begins to read `buffer.len()` bytes at `offset`, in the second lane.
    pub fn read<B: Buffer>(&self, buffer: B, offset: u64) -> std::result::Result<Ticket<B>, NotBegun<B>> {
        self.read_in(Lane::Second, buffer, offset)
    }

    /// Begins a read in the lane that the caller chooses. An unaligned read uses the lane only for its transfers from
    /// the device. The queue of the copy threads ignores the lane.
    pub fn read_in<B: Buffer>(
        &self,
        lane: Lane,
        buffer: B,
        offset: u64,
    ) -> std::result::Result<Ticket<B>, NotBegun<B>> {
        self.begin((Kind::Read, lane), buffer, offset)
    }

    /// Begins to write the buffer at `offset`. The write ends when the device has the bytes, or the page cache if I/O
    /// on the device is buffered. [`flush`](Self::flush) makes the bytes durable.
    pub fn write<B: Buffer>(&self, buffer: B, offset: u64) -> std::result::Result<Ticket<B>, NotBegun<B>> {
        self.begin((Kind::Write { durable: false }, Lane::Second), buffer, offset)
    }

    /// Begins to write the buffer at `offset`. The write ends once these bytes survive a power loss, together with the
    /// file system's metadata that locates them. The call makes no other write durable.
    pub fn write_durable<B: Buffer>(&self, buffer: B, offset: u64) -> std::result::Result<Ticket<B>, NotBegun<B>> {
        self.begin((Kind::Write { durable: true }, Lane::Second), buffer, offset)
    }

    /// Makes every write that began before the call survive a power loss, on every device.
    ///
    /// A failed flush or durable write makes every later flush fail: the kernel has dropped the data that it could not
    /// write, and a second flush would succeed without that data. A flush also reports, once, a failed write whose
    /// ticket was dropped before it reported the failure.
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

    /// Rejects new operations, waits for the operations in flight, ends the threads and closes the devices. `close` may
    /// be called again, also after an interrupted wait. Reports a failed write whose ticket was dropped before it
    /// reported the failure.
    pub fn close(&self, mut wait: Wait<'_>) -> Result<()> {
        self.context.check_process()?;
        self.context.traffic.close();
        self.context.traffic.wait_for_all(&mut wait)?;
        drop(self.running.write().unwrap_or_else(PoisonError::into_inner).take());
        locked(&self.context.unclaimed).take().map_or(Ok(()), Err)
    }

    /// True once the volume is closed, and in a forked child.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.context.maker.is_elsewhere() || self.running().is_none()
    }

    /// The size of the volume in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Relaxed)
    }

    /// Returns true at once if the volume holds `size_bytes` already. Otherwise permanently grows the volume's files
    /// until it does. Returns false, and keeps the size of the volume, if a file system has no room, a raw device is
    /// too small, or the volume is simulated or closed. Files that have grown before the failure stay grown.
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

    /// A transfer needs no copy if its offset, length and address are multiples of this number. The number is 1 without
    /// direct I/O.
    #[must_use]
    pub fn alignment(&self) -> usize {
        self.context.block_bytes.max(self.context.memory_align)
    }

    /// True if every device bypasses the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.devices.iter().all(|device| device.why_buffered.is_none())
    }

    /// The backend that serves this volume.
    #[must_use]
    pub fn backend(&self) -> BackendKind {
        self.kind
    }

    /// Why the volume uses threads although the caller's choice allowed `io_uring`; else `None`.
    #[must_use]
    pub fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// The queue depth. With n devices, the kernel has at most n times this number of requests at once.
    #[must_use]
    pub fn queue_depth(&self) -> usize {
        self.queue_depth
    }

    /// The devices, in stripe order.
    #[must_use]
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    /// Bytes of the chunks for unaligned transfers: 0 before the first unaligned transfer.
    #[must_use]
    pub fn copy_bytes(&self) -> usize {
        let running = self.running();
        running.as_ref().map_or(0, |running| running.unaligned.bytes())
    }

    /// Returns the counters since the volume was opened; zeros in a forked child.
    #[must_use]
    pub fn stats(&self) -> VolumeStats {
        if self.context.maker.is_elsewhere() {
            // At the fork, another thread of the parent may have held these locks, so waiting for a lock could hang.
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

    /// Does every step that can fail, so that `Prepared::start` cannot fail.
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
                // Another operation reads and rewrites one of these blocks. Leave the whole write to the copy threads,
                // which wait for that operation (see [Note: block holds] in `traffic.rs`).
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
            // The threads, the ring and the operations belong to the parent process. The fork handler has already
            // closed the descriptors in this child.
            std::mem::forget(running);
            return;
        }
        if let Some(running) = running {
            // The kernel may still write to buffers, so `running` is dropped only after all operations have ended.
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

/// An operation that has passed every check and has been registered with `traffic`.
struct Prepared<'a> {
    running: &'a Running,
    kind: Kind,
    lane: Lane,
    address: Address,
    /// The range of the volume that the operation moves.
    whole: Range<u64>,
    /// The whole blocks inside `whole` that move directly between memory and disk. If no block moves directly, this is
    /// an empty range at the end of `whole`.
    straight: Range<u64>,
    begun: Begun,
    /// The shared hold on `straight`, for a write.
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

/// Returns the whole blocks inside `whole`; an empty range at the end of `whole` if there are no whole blocks.
fn whole_blocks(context: &Context, whole: &Range<u64>) -> Range<u64> {
    let block = context.block_bytes as u64;
    match (whole.start.checked_next_multiple_of(block), whole.end / block * block) {
        (Some(start), end) if start < end => start..end,
        _ => whole.end..whole.end,
    }
}
