//! Maps memory from the kernel: guard pages, huge pages, populated before use.
//!
//! The order matters: `MADV_HUGEPAGE` before `MADV_POPULATE_WRITE`, because what has been populated with 4 KiB pages
//! stays on 4 KiB pages; populate before mlock, because mlock would populate too.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader},
    ptr::{self, NonNull},
};

use rustix::{
    io::{Errno, retry_on_intr},
    mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mlock, mmap_anonymous, mprotect, munlock, munmap},
};

use crate::{Error, Result};

/// The size of a page, as the kernel says.
#[must_use]
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// Whether memory can lie on transparent huge pages, and of what size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePages {
    /// Of so many bytes.
    Of(usize),
    /// Not at all, and why.
    Off(&'static str),
}

/// The size of a huge page where the kernel does not say (a container without `/sys`): that of x86-64, and of aarch64
/// with 4 KiB pages.
const HUGE_PAGE_BYTES_ASSUMED: usize = 2 << 20;

/// Whether this process can have huge pages.
#[must_use]
pub fn huge_pages() -> HugePages {
    const DIRECTORY: &str = "/sys/kernel/mm/transparent_hugepage";
    if fs::read_to_string(format!("{DIRECTORY}/enabled")).is_ok_and(|enabled| enabled.contains("[never]")) {
        return HugePages::Off(
            "transparent huge pages are off; turn them on with: echo madvise | sudo tee \
             /sys/kernel/mm/transparent_hugepage/enabled",
        );
    }
    if fs::read_to_string("/proc/self/status").is_ok_and(|status| status.contains("THP_enabled:\t0")) {
        return HugePages::Off("transparent huge pages are switched off for this process (prctl PR_SET_THP_DISABLE)");
    }
    let stated =
        fs::read_to_string(format!("{DIRECTORY}/hpage_pmd_size")).ok().and_then(|text| text.trim().parse().ok());
    let bytes: usize = stated.unwrap_or(HUGE_PAGE_BYTES_ASSUMED);
    if bytes.is_power_of_two() && bytes > page_bytes() {
        HugePages::Of(bytes)
    } else {
        HugePages::Off("this kernel has no transparent huge pages")
    }
}

/// Asked between pieces of long work; `false` ends it.
pub type KeepGoing<'a> = &'a mut dyn FnMut() -> bool;

/// How much is populated or locked between two questions: some 10 to 30 ms.
const PIECE_BYTES: usize = 64 << 20;

/// Readable and writable zeroed pages with a guard page on either side.
///
/// The guards turn an overrun into a fault at the byte that did it, and keep the kernel from merging this mapping with
/// a neighbour, so that `/proc/self/smaps` speaks of it alone.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory, owned by this value; who may touch which bytes is decided by the leases.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` gives out an address, and dereferencing that is unsafe where it happens.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps and populates `bytes`, a multiple of the page size.
    pub(crate) fn new(bytes: usize, keep_going: KeepGoing<'_>) -> Result<Self> {
        let failed = |call| move |errno: Errno| Error::System { call, nbytes: bytes, source: errno.into() };
        // Below one huge page there is nothing to align for.
        let align = match huge_pages() {
            HugePages::Of(huge) if bytes >= huge => huge,
            _ => page_bytes(),
        };
        let mapping = reserve(bytes, align).map_err(failed("mmap"))?;
        match mapping.advise(Advice::LinuxHugepage) {
            // The answer of a kernel that was built without this advice.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(failed("madvise(MADV_HUGEPAGE)")(errno)),
        }
        let populated = mapping.by_pieces(keep_going, populate)?;
        populated.map_err(failed("madvise(MADV_POPULATE_WRITE)"))?;
        Ok(mapping)
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Children of a fork see zeros here, and the parent's pages are not shared with them.
    pub(crate) fn wipe_on_fork(&self) -> Result<()> {
        self.advise(Advice::LinuxWipeOnFork).map_err(|errno| Error::System {
            call: "madvise(MADV_WIPEONFORK)",
            nbytes: self.bytes,
            source: errno.into(),
        })
    }

    /// Locks the pages into memory until they are unmapped. The outer error is an interruption; then, and after a
    /// refusal, nothing stays locked.
    pub(crate) fn lock(&self, keep_going: KeepGoing<'_>) -> Result<rustix::io::Result<()>> {
        // SAFETY: the range is mapped and ours.
        let locked = self.by_pieces(keep_going, |start, bytes| unsafe { mlock(start.cast(), bytes) });
        if !matches!(locked, Ok(Ok(()))) {
            // SAFETY: the range is mapped and ours; pages that are not locked do not mind.
            let _ = unsafe { munlock(self.start.as_ptr().cast(), self.bytes) };
        }
        locked
    }

    /// How many bytes of the mapping that starts at `start` lie on huge pages now, from `/proc/self/smaps`; 0 where that
    /// cannot be read, or nothing starts there.
    pub(crate) fn huge_bytes_at(start: NonNull<u8>) -> usize {
        let Ok(smaps) = File::open("/proc/self/smaps") else { return 0 };
        // The kernel writes eight digits at least: a low address, as Valgrind gives, begins with a nought.
        let start = format!("{:08x}-", start.as_ptr().addr());
        BufReader::new(smaps)
            .lines()
            .map_while(io::Result::ok)
            .skip_while(|line| !line.starts_with(&start))
            .find_map(|line| line.strip_prefix("AnonHugePages:")?.trim().strip_suffix(" kB")?.parse::<usize>().ok())
            .map_or(0, |kib| kib * 1024)
    }

    fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        advise(self.start.as_ptr(), self.bytes, advice)
    }

    /// Does `work` piece by piece, until it fails or is interrupted.
    fn by_pieces(
        &self,
        keep_going: KeepGoing<'_>,
        work: impl Fn(*mut u8, usize) -> rustix::io::Result<()>,
    ) -> Result<rustix::io::Result<()>> {
        for offset in (0..self.bytes).step_by(PIECE_BYTES) {
            if offset > 0 && !keep_going() {
                return Err(Error::Interrupted { asked_bytes: self.bytes });
            }
            let done = work(self.start.as_ptr().wrapping_add(offset), PIECE_BYTES.min(self.bytes - offset));
            if done.is_err() {
                return Ok(done);
            }
        }
        Ok(Ok(()))
    }
}

/// Faults every page in now, so that the run never does and a shortage shows here.
fn populate(start: *mut u8, bytes: usize) -> rustix::io::Result<()> {
    match retry_on_intr(|| advise(start, bytes, Advice::LinuxPopulateWrite)) {
        // Before Linux 5.14 the advice is unknown: touch each page.
        Err(Errno::INVAL) => {
            for offset in (0..bytes).step_by(page_bytes()) {
                // SAFETY: inside a mapping that nobody else knows yet.
                unsafe { start.wrapping_add(offset).write_volatile(0) };
            }
            Ok(())
        }
        result => result,
    }
}

/// Advises on a range of a mapping of ours.
fn advise(start: *mut u8, bytes: usize, advice: Advice) -> rustix::io::Result<()> {
    // SAFETY: both callers pass a mapped range that is ours; none of the advice used here takes its contents away.
    unsafe { madvise(start.cast(), bytes, advice) }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let (outer, outer_bytes) = with_guards(self.start, self.bytes);
        // SAFETY: exactly what `reserve` left mapped; whoever owns the mapping has seen to it that no lease remains.
        let result = unsafe { munmap(outer.cast(), outer_bytes) };
        debug_assert!(result.is_ok(), "munmap: {result:?}");
    }
}

/// Maps `bytes` at a multiple of `align`, with a guard page before and after.
fn reserve(bytes: usize, align: usize) -> rustix::io::Result<Mapping> {
    let total = bytes.checked_add(align + 2 * page_bytes()).ok_or(Errno::NOMEM)?;
    // SAFETY: a new anonymous mapping at an address that the kernel chooses.
    let base =
        unsafe { mmap_anonymous(ptr::null_mut(), total, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE) }?;
    let base: *mut u8 = base.cast();
    let start = base.wrapping_add((base.addr() + page_bytes()).next_multiple_of(align) - base.addr());
    let start = NonNull::new(start).ok_or(Errno::NOMEM)?;
    let mapping = Mapping { start, bytes };
    let (outer, outer_bytes) = with_guards(start, bytes);
    let before = outer.addr() - base.addr();
    for (address, length) in [(base, before), (outer.wrapping_add(outer_bytes), total - before - outer_bytes)] {
        if length > 0 {
            // SAFETY: part of the mapping made above, outside what `mapping` owns.
            unsafe { munmap(address.cast(), length) }?;
        }
    }
    // SAFETY: the inner pages of the mapping made above.
    unsafe { mprotect(start.as_ptr().cast(), bytes, MprotectFlags::READ | MprotectFlags::WRITE) }?;
    Ok(mapping)
}

fn with_guards(start: NonNull<u8>, bytes: usize) -> (*mut u8, usize) {
    (start.as_ptr().wrapping_sub(page_bytes()), bytes + 2 * page_bytes())
}
