//! Maps memory from the kernel. Each mapping has guard pages, is on huge pages if possible, and is populated before
//! use.
//!
//! The order of the calls matters. `MADV_HUGEPAGE` comes before `MADV_POPULATE_WRITE`, because memory that is populated
//! with pages of 4 KiB keeps these pages. `MADV_POPULATE_WRITE` comes before `mlock`, because `mlock` also populates
//! pages.

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

/// The kernel's page size in bytes.
#[must_use]
pub fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// Whether transparent huge pages are available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePages {
    /// Huge pages are available. The value is the size of one huge page in bytes.
    Of(usize),
    /// Huge pages are not available. The value is the reason.
    Off(&'static str),
}

/// The size of a huge page if `/sys` does not state it, as in some containers. It is the size on x86-64, and on aarch64
/// with pages of 4 KiB.
const HUGE_PAGE_BYTES_ASSUMED: usize = 2 << 20;

/// Returns whether this process can have huge pages.
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
        return HugePages::Off(
            "transparent huge pages are off for this process; do not set PR_SET_THP_DISABLE (prctl)",
        );
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

/// A function that a long operation calls from time to time. If it returns `false`, the operation ends.
pub type KeepGoing<'a> = &'a mut dyn FnMut() -> bool;

/// Number of bytes that are populated or locked between two calls of `keep_going`. One such piece takes some 10 to 30
/// ms.
const PIECE_BYTES: usize = 64 << 20;

/// Readable and writable pages, zero at first. There is a guard page before them and a guard page after them.
///
/// If code writes just past the mapping, a guard page turns the write into a fault. Guard pages also keep the kernel
/// from merging this mapping with a neighbour. So `/proc/self/smaps` has an entry for this mapping alone.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory that this value owns; leases decide which code may access which bytes.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives out an address, and makes system calls that any thread may make. Dereferencing the address
// needs unsafe code.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps and populates `bytes` bytes. `bytes` must be a multiple of the page size.
    pub(crate) fn new(bytes: usize, keep_going: KeepGoing<'_>) -> Result<Self> {
        let failed = |call| move |errno: Errno| Error::System { call, nbytes: bytes, source: errno.into() };
        // A mapping smaller than a huge page need not be aligned to huge pages.
        let align = match huge_pages() {
            HugePages::Of(huge) if bytes >= huge => huge,
            _ => page_bytes(),
        };
        let mapping = reserve(bytes, align).map_err(failed("mmap"))?;
        match mapping.advise(Advice::LinuxHugepage) {
            // `EINVAL`: this kernel was built without transparent huge pages.
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

    /// Makes forked children see zeros in this mapping, so that they share no pages with the parent.
    pub(crate) fn wipe_on_fork(&self) -> Result<()> {
        self.advise(Advice::LinuxWipeOnFork).map_err(|errno| Error::System {
            call: "madvise(MADV_WIPEONFORK)",
            nbytes: self.bytes,
            source: errno.into(),
        })
    }

    /// Locks the pages into memory until they are unmapped. The outer error says that `keep_going` returned false. The
    /// inner error comes from the kernel. After an error, no page stays locked.
    pub(crate) fn lock(&self, keep_going: KeepGoing<'_>) -> Result<rustix::io::Result<()>> {
        // SAFETY: the range is part of this mapping.
        let locked = self.by_pieces(keep_going, |start, bytes| unsafe { mlock(start.cast(), bytes) });
        if !matches!(locked, Ok(Ok(()))) {
            // SAFETY: the range is this mapping; unlocking pages that are not locked is allowed.
            let _ = unsafe { munlock(self.start.as_ptr().cast(), self.bytes) };
        }
        locked
    }

    /// Returns how many bytes of the mapping at `start` are on huge pages, from `/proc/self/smaps`. Returns 0 if this
    /// file cannot be read, or has no mapping at `start`.
    pub(crate) fn huge_bytes_at(start: NonNull<u8>) -> usize {
        let Ok(smaps) = File::open("/proc/self/smaps") else { return 0 };
        // The kernel pads an address with zeros to eight digits. Under Valgrind, addresses are so low that they are
        // padded.
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

    /// Applies `work` to one piece after another, until `work` fails or `keep_going` returns false.
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

/// Populates every page. So first accesses cause no page faults later. A shortage of memory becomes an error here, but
/// not on Linux before 5.14.
fn populate(start: *mut u8, bytes: usize) -> rustix::io::Result<()> {
    match retry_on_intr(|| advise(start, bytes, Advice::LinuxPopulateWrite)) {
        // Linux before 5.14 does not have this advice, so touch each page.
        Err(Errno::INVAL) => {
            for offset in (0..bytes).step_by(page_bytes()) {
                // SAFETY: the byte is inside a new mapping that no other code uses yet.
                unsafe { start.wrapping_add(offset).write_volatile(0) };
            }
            Ok(())
        }
        result => result,
    }
}

/// Gives the kernel advice on a range of a mapping.
fn advise(start: *mut u8, bytes: usize, advice: Advice) -> rustix::io::Result<()> {
    // SAFETY: callers pass a range of a mapping that this module made, and no advice that they pass discards the
    // contents in this process.
    unsafe { madvise(start.cast(), bytes, advice) }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let (outer, outer_bytes) = with_guards(self.start, self.bytes);
        // SAFETY: the range is the mapping and its two guard pages. The owner drops the mapping only after the last
        // lease.
        let result = unsafe { munmap(outer.cast(), outer_bytes) };
        debug_assert!(result.is_ok(), "munmap: {result:?}");
    }
}

/// Maps `bytes` at a multiple of `align`, with a guard page before and after.
fn reserve(bytes: usize, align: usize) -> rustix::io::Result<Mapping> {
    let total = bytes.checked_add(align + 2 * page_bytes()).ok_or(Errno::NOMEM)?;
    // SAFETY: `mmap_anonymous` makes a new mapping at an address that the kernel chooses.
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
            // SAFETY: the range is part of the new mapping, and outside the pages of `mapping`.
            unsafe { munmap(address.cast(), length) }?;
        }
    }
    // SAFETY: the range is the new mapping without its guard pages.
    unsafe { mprotect(start.as_ptr().cast(), bytes, MprotectFlags::READ | MprotectFlags::WRITE) }?;
    Ok(mapping)
}

fn with_guards(start: NonNull<u8>, bytes: usize) -> (*mut u8, usize) {
    (start.as_ptr().wrapping_sub(page_bytes()), bytes + 2 * page_bytes())
}
