//! Maps regions of memory, and lists them while they are mapped. Regions are on huge pages if possible, and pinned as
//! the caller asks.

use std::{
    fmt, io,
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use rustix::io::Errno;

use crate::{
    Error, Result,
    arena::Shared,
    cuda::{Registration, Search},
    guarded::locked,
    limits::memory_limits,
    living::{Maker, living},
    mapping::{HugePages, KeepGoing, Mapping, huge_pages, page_bytes},
    users::LeaseCount,
};

/// The pinning that the caller asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pin {
    /// The best pinning that is possible: by CUDA if the process uses CUDA already, else by `mlock`, else none.
    /// [`Region::why_not`] says why a region is not pinned by CUDA.
    #[default]
    Auto,
    /// The memory is locked with `mlock`. If `mlock` fails, [`Region::new`] returns an error.
    Mlock,
    /// The memory is registered with CUDA, which also locks it. If CUDA fails, [`Region::new`] returns an error.
    Cuda,
    /// The memory is not pinned, so the kernel may swap it out.
    Off,
}

/// The pinning that a region has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinned {
    /// Not pinned.
    No,
    /// Locked with `mlock`.
    Mlock,
    /// Registered with CUDA.
    Cuda,
}

/// The contents of a region in a forked child.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnFork {
    /// A copy, as for other memory. Parent and child share each page until one of them writes to it. The writer then
    /// gets a copy of 4 KiB. So a parent that continues training loses its huge pages, and some bytes exist twice while
    /// the child lives.
    #[default]
    Copy,
    /// The child sees zeros, and the parent keeps its pages. Use this for memory that children do not use.
    Wipe,
}

/// The entry of a region in the list that [`regions`] returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionStats {
    /// The owner's name, for accounting.
    pub owner: String,
    /// Bytes mapped: the bytes that the caller asked for, rounded up to whole pages.
    pub bytes: usize,
    /// How the region is pinned.
    pub pinned: Pinned,
}

/// Page-aligned memory. Clones are handles of the same region.
///
/// After `close`, the region rejects new leases, and it is unmapped once no lease is left. It is also unmapped when all
/// handles, arenas and leases are dropped.
#[derive(Clone)]
pub struct Region {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    owner: String,
    asked_bytes: usize,
    start: NonNull<u8>,
    bytes: usize,
    pinned: Pinned,
    why_not: Option<String>,
    maker: Maker,
    users: LeaseCount,
    /// `None` once the region is unmapped.
    pages: Mutex<Option<Pages>>,
    /// The arena that divides the region, while this arena lives.
    arena: Mutex<Weak<Shared>>,
}

// SAFETY: `start` is an address. The bytes at this address are accessed through leases, which do not overlap.
unsafe impl Send for Inner {}
// SAFETY: as for `Send`; all other fields are immutable or synchronised.
unsafe impl Sync for Inner {}

/// The memory of a region. [`Inner::release`] first unregisters the memory from CUDA, then unmaps the memory.
struct Pages {
    registration: Option<Registration>,
    mapping: Mapping,
}

impl Region {
    /// Maps at least `nbytes` bytes, populates the pages, and pins them as `pin` says. The memory is counted under the
    /// name `owner`.
    pub fn new(nbytes: usize, pin: Pin, on_fork: OnFork, owner: &str) -> Result<Self> {
        Self::interruptible(nbytes, pin, on_fork, owner, &mut || true)
    }

    /// Does the same as [`Region::new`], but can be interrupted. Populating and locking memory take 0.1 to 0.5 s per
    /// GiB, and call `keep_going` every 64 MiB. If `keep_going` returns `false`, the call ends with an error.
    pub fn interruptible(
        nbytes: usize,
        pin: Pin,
        on_fork: OnFork,
        owner: &str,
        keep_going: KeepGoing<'_>,
    ) -> Result<Self> {
        let maker = Maker::here();
        let bytes = nbytes
            .checked_next_multiple_of(page_bytes())
            .filter(|&bytes| bytes > 0 && isize::try_from(bytes).is_ok())
            .ok_or_else(|| Error::Invalid(format!("{nbytes} bytes cannot be mapped: ask for 1 to 2^62 bytes")))?;
        let headroom = memory_limits().headroom;
        if bytes > headroom.available_bytes {
            return Err(Error::OutOfMemory {
                needed_bytes: bytes,
                available_bytes: headroom.available_bytes,
                limited_by: headroom.limited_by,
            });
        }
        let mapping = Mapping::new(bytes, keep_going)?;
        if on_fork == OnFork::Wipe {
            mapping.wipe_on_fork()?;
        }
        let (pinned, registration, why_not) = pinned(&mapping, pin, keep_going)?;
        let inner = Arc::new(Inner {
            owner: owner.into(),
            asked_bytes: nbytes,
            start: mapping.start(),
            bytes,
            pinned,
            why_not,
            maker,
            users: LeaseCount::new(),
            pages: Mutex::new(Some(Pages { registration, mapping })),
            arena: Mutex::new(Weak::new()),
        });
        let mut living = living();
        living.regions.retain(|region| region.strong_count() > 0);
        living.regions.push(Arc::downgrade(&inner));
        Ok(Self { inner })
    }

    /// The bytes that the caller asked for.
    #[must_use]
    pub fn asked_bytes(&self) -> usize {
        self.inner.asked_bytes
    }

    /// The bytes mapped: the bytes that the caller asked for, rounded up to whole pages.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.inner.bytes
    }

    /// How the region is pinned.
    #[must_use]
    pub fn pinned(&self) -> Pinned {
        self.inner.pinned
    }

    /// With `Pin::Auto`, why CUDA did not pin the region. `None` if CUDA pinned it, or with another `Pin`.
    #[must_use]
    pub fn why_not(&self) -> Option<&str> {
        self.inner.why_not.as_deref()
    }

    /// Returns how many bytes of the region are on huge pages now. Reads `/proc/self/smaps`, which takes milliseconds.
    #[must_use]
    pub fn huge_bytes(&self) -> usize {
        // `is_mapped` releases its lock before the long read below, so a fork during the read copies no held lock.
        if !self.inner.is_mapped() {
            return 0;
        }
        Mapping::huge_bytes_at(self.inner.start)
    }

    /// If huge pages are not available, returns the reason. Otherwise returns why the region has fewer huge pages than
    /// fit into it, or `None` if it has all huge pages that fit or is unmapped.
    #[must_use]
    pub fn why_not_huge(&self) -> Option<String> {
        let possible = match huge_pages() {
            HugePages::Of(huge) => self.inner.bytes / huge * huge,
            HugePages::Off(why) => return Some(why.into()),
        };
        let got = self.huge_bytes();
        (got < possible && self.inner.is_mapped()).then(|| {
            format!(
                "only {got} of {possible} bytes are on huge pages: free memory may be fragmented, or a fork split pages"
            )
        })
    }

    /// True once [`Region::close`] was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.inner.users.is_closed()
    }

    /// Rejects new leases and ends every wait for a lease. If no lease lives, unmaps the region at once. Otherwise the
    /// region is unmapped when its last lease is dropped. A second call does nothing.
    pub fn close(&self) {
        let nobody_left = self.inner.users.close();
        if self.inner.forked() {
            // In a forked child, locks may be held for ever ([Note: forked child] in `living.rs`), so do not unmap
            // here. The child's memory is unmapped when the child drops its last handle of the region.
            return;
        }
        let arena = locked(&self.inner.arena).upgrade();
        if let Some(arena) = arena {
            arena.close();
        }
        if nobody_left {
            self.inner.unmap();
        }
    }

    /// Builds an arena with `make`, and registers that this arena divides the region.
    ///
    /// # Errors
    /// [`Error::RegionTaken`] if another living arena divides the region, [`Error::Closed`] if the region is closed,
    /// [`Error::Forked`] in a forked child, and the errors of `make`.
    pub(crate) fn claim(&self, make: impl FnOnce() -> Result<Arc<Shared>>) -> Result<Arc<Shared>> {
        self.inner.usable()?;
        let mut arena = locked(&self.inner.arena);
        if arena.strong_count() > 0 {
            return Err(Error::RegionTaken);
        }
        let shared = make()?;
        *arena = Arc::downgrade(&shared);
        Ok(shared)
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("owner", &self.inner.owner)
            .field("bytes", &self.inner.bytes)
            .field("pinned", &self.inner.pinned)
            .field("closed", &self.is_closed())
            .finish_non_exhaustive()
    }
}

impl Inner {
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns an error if the region is closed, or if this process is a fork of the process that made the region.
    pub(crate) fn usable(&self) -> Result<()> {
        if self.forked() {
            Err(Error::Forked)
        } else if self.users.is_closed() {
            Err(Error::Closed)
        } else {
            Ok(())
        }
    }

    /// True if this process is a fork of the process that made the region.
    pub(crate) fn forked(&self) -> bool {
        self.maker.is_elsewhere()
    }

    /// Counts a new lease. Returns an error if the region is closed.
    pub(crate) fn enter(&self) -> Result<()> {
        if self.users.enter() { Ok(()) } else { Err(Error::Closed) }
    }

    /// Counts a dropped lease. If the region is closed and this was its last lease, unmaps the region.
    pub(crate) fn leave(&self) {
        if self.users.leave() {
            self.unmap();
        }
    }

    /// True while the memory is mapped. In a forked child, true if the region was not closed.
    fn is_mapped(&self) -> bool {
        if self.forked() { !self.users.is_closed() } else { locked(&self.pages).is_some() }
    }

    fn unmap(&self) {
        let pages = locked(&self.pages).take();
        self.release(pages);
    }

    fn release(&self, pages: Option<Pages>) {
        let Some(Pages { registration, mapping }) = pages else { return };
        match registration {
            // A forked child owns its copy of the pages, but must not use the parent's CUDA context.
            Some(registration) if self.forked() => registration.abandon(),
            registration => drop(registration),
        }
        drop(mapping);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let pages = self.pages.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        self.release(pages);
    }
}

/// Returns the mapped regions of this process. File mappings and memory on the heap are not in the list.
#[must_use]
pub fn regions() -> Vec<RegionStats> {
    let inners: Vec<Arc<Inner>> = living().regions.iter().filter_map(Weak::upgrade).collect();
    inners
        .iter()
        .filter(|inner| !inner.forked() && inner.is_mapped())
        .map(|inner| RegionStats { owner: inner.owner.clone(), bytes: inner.bytes, pinned: inner.pinned })
        .collect()
}

/// Pins a mapping as `pin` says. Returns the pinning, the CUDA registration and, with `Pin::Auto`, why CUDA did not pin
/// the mapping.
fn pinned(
    mapping: &Mapping,
    pin: Pin,
    keep_going: KeepGoing<'_>,
) -> Result<(Pinned, Option<Registration>, Option<String>)> {
    let register = |search| {
        // SAFETY: `Inner::release` drops the registration before the mapping.
        unsafe { Registration::new(mapping.start(), mapping.bytes(), search) }
    };
    let refused = |why| Error::PinRefused { why };
    match pin {
        Pin::Off => Ok((Pinned::No, None, None)),
        Pin::Mlock => lock(mapping, keep_going)?.map(|()| (Pinned::Mlock, None, None)).map_err(refused),
        Pin::Cuda => register(Search::Load).map(|held| (Pinned::Cuda, Some(held), None)).map_err(refused),
        Pin::Auto => match register(Search::Loaded) {
            Ok(held) => Ok((Pinned::Cuda, Some(held), None)),
            Err(no_cuda) => Ok(match lock(mapping, keep_going)? {
                Ok(()) => (Pinned::Mlock, None, Some(format!("not pinned for CUDA: {no_cuda}"))),
                Err(no_lock) => {
                    (Pinned::No, None, Some(format!("not locked: {no_lock}; not pinned for CUDA: {no_cuda}")))
                }
            }),
        },
    }
}

/// Locks the mapping with `mlock`. The inner error says why this failed and, if a limit may be the cause, how to raise
/// the limit. The outer error says that `keep_going` returned false.
fn lock(mapping: &Mapping, keep_going: KeepGoing<'_>) -> Result<std::result::Result<(), String>> {
    let Err(errno) = mapping.lock(keep_going)? else { return Ok(Ok(())) };
    let (soft, hard) = memory_limits().memlock;
    let bytes = mapping.bytes();
    Ok(Err(match (errno, soft) {
        (Errno::NOMEM | Errno::AGAIN | Errno::PERM, Some(soft)) => format!(
            "mlock of {bytes} bytes failed, probably because of RLIMIT_MEMLOCK (soft limit {soft} bytes, hard limit \
             {}, both for the whole process); raise the limit with `ulimit -l`, `memlock` in \
             /etc/security/limits.conf, LimitMEMLOCK= in systemd, or `docker run --ulimit memlock=-1`",
            hard.map_or_else(|| "unlimited".into(), |hard| format!("{hard} bytes"))
        ),
        _ => format!("mlock of {bytes} bytes failed: {}", io::Error::from(errno)),
    }))
}
