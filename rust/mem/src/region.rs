//! Regions: page-exact memory on huge pages, pinned where possible, and listed while they live.

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
    users::Users,
};

/// What pinning is wished for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pin {
    /// The best that can be had; [`Region::why_not`] says why no more.
    #[default]
    Auto,
    /// Locked into memory, or an error.
    Mlock,
    /// Registered with CUDA (and so locked), or an error.
    Cuda,
    /// Pageable.
    Off,
}

/// What pinning a region has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinned {
    /// None.
    No,
    /// `mlock`.
    Mlock,
    /// CUDA host registration.
    Cuda,
}

/// What a child process that is forked off sees of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnFork {
    /// A copy, as of all other memory. Pages are shared until one side writes; then the writer gets 4 KiB copies, so a
    /// parent that trains on loses its huge pages and holds some bytes twice while the child lives.
    #[default]
    Copy,
    /// Zeros. The parent keeps its pages as they are: for memory that no child has business with.
    Wipe,
}

/// What the list of living regions says of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionStats {
    /// The name under which its bytes are accounted for.
    pub owner: String,
    /// Bytes mapped: what was asked for, rounded up to the page.
    pub bytes: usize,
    /// How it is pinned.
    pub pinned: Pinned,
}

/// Page-aligned memory that is ours. Cheap to clone: clones are the same region.
///
/// Closing ends new leases at once and unmaps when the last living lease has gone; dropping every handle does the
/// same without the closing.
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
    users: Users,
    /// `None` once unmapped.
    pages: Mutex<Option<Pages>>,
    /// The arena that divides the region, if one lives.
    arena: Mutex<Weak<Shared>>,
}

// SAFETY: `start` is an address; the bytes behind it are reached through leases, each of which has its own.
unsafe impl Send for Inner {}
// SAFETY: as above; everything else in here is synchronised.
unsafe impl Sync for Inner {}

/// What [`Inner::let_go`] takes apart: CUDA lets go of the memory before the kernel does.
struct Pages {
    registration: Option<Registration>,
    mapping: Mapping,
}

impl Region {
    /// Maps at least `nbytes`, populated and pinned as wished, accounted under `owner`.
    pub fn new(nbytes: usize, pin: Pin, on_fork: OnFork, owner: &str) -> Result<Self> {
        Self::interruptible(nbytes, pin, on_fork, owner, &mut || true)
    }

    /// As [`Region::new`], which takes 0.1 to 0.5 s per GiB; `keep_going` is asked every 64 MiB and ends it with `false`.
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
            .ok_or_else(|| Error::Invalid(format!("a region of {nbytes} bytes cannot be mapped")))?;
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
            users: Users::new(),
            pages: Mutex::new(Some(Pages { registration, mapping })),
            arena: Mutex::new(Weak::new()),
        });
        let mut living = living();
        living.regions.retain(|region| region.strong_count() > 0);
        living.regions.push(Arc::downgrade(&inner));
        Ok(Self { inner })
    }

    /// What was asked for.
    #[must_use]
    pub fn asked_bytes(&self) -> usize {
        self.inner.asked_bytes
    }

    /// What is mapped: the asked bytes rounded up to the page.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.inner.bytes
    }

    /// How it is pinned.
    #[must_use]
    pub fn pinned(&self) -> Pinned {
        self.inner.pinned
    }

    /// Why it is not pinned better, if more was wished for.
    #[must_use]
    pub fn why_not(&self) -> Option<&str> {
        self.inner.why_not.as_deref()
    }

    /// How many of its bytes lie on huge pages now. Reads `/proc/self/smaps`, which takes milliseconds.
    #[must_use]
    pub fn huge_bytes(&self) -> usize {
        // The lock is not held while the kernel is asked: that takes long enough for a fork to fall into it.
        if !self.inner.is_mapped() {
            return 0;
        }
        Mapping::huge_bytes_at(self.inner.start)
    }

    /// Why less than all of it lies on huge pages; `None` where all does that can.
    #[must_use]
    pub fn why_not_huge(&self) -> Option<String> {
        let possible = match huge_pages() {
            HugePages::Of(huge) => self.inner.bytes / huge * huge,
            HugePages::Off(why) => return Some(why.into()),
        };
        let got = self.huge_bytes();
        (got < possible && self.inner.is_mapped()).then(|| {
            format!("{got} of {possible} bytes: the machine's free memory is too fragmented, or a fork split the pages")
        })
    }

    /// Whether [`Region::close`] was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.inner.users.is_closed()
    }

    /// Ends new leases and every wait for one. Unmaps now, or when the last living lease goes. Twice is fine.
    pub fn close(&self) {
        let nobody_left = self.inner.users.close();
        if self.inner.forked() {
            // A lock may have been copied in the middle of a hold; the child's copy is unmapped with its last handle.
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

    /// Gives the region to the arena that `make` builds, unless another one that still lives has it.
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

    /// Whether this process may use the region.
    pub(crate) fn usable(&self) -> Result<()> {
        if self.forked() {
            Err(Error::Forked)
        } else if self.users.is_closed() {
            Err(Error::Closed)
        } else {
            Ok(())
        }
    }

    /// Whether this process is a fork of the one that made the region.
    pub(crate) fn forked(&self) -> bool {
        self.maker.is_elsewhere()
    }

    /// Counts one more lease, unless the region is closed.
    pub(crate) fn enter(&self) -> Result<()> {
        if self.users.enter() { Ok(()) } else { Err(Error::Closed) }
    }

    /// Counts one lease less; the last one of a closed region unmaps.
    pub(crate) fn leave(&self) {
        if self.users.leave() {
            self.unmap();
        }
    }

    /// Whether the memory is still there. In a forked child: whether the region is open.
    fn is_mapped(&self) -> bool {
        if self.forked() { !self.users.is_closed() } else { locked(&self.pages).is_some() }
    }

    fn unmap(&self) {
        let pages = locked(&self.pages).take();
        self.let_go(pages);
    }

    fn let_go(&self, pages: Option<Pages>) {
        let Some(Pages { registration, mapping }) = pages else { return };
        match registration {
            // The child of a fork owns its copy of the pages, and no part of the parent's CUDA context.
            Some(registration) if self.forked() => registration.abandon(),
            registration => drop(registration),
        }
        drop(mapping);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let pages = self.pages.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        self.let_go(pages);
    }
}

/// The regions that are mapped now: every byte of host memory that the library holds for data.
#[must_use]
pub fn regions() -> Vec<RegionStats> {
    let inners: Vec<Arc<Inner>> = living().regions.iter().filter_map(Weak::upgrade).collect();
    inners
        .iter()
        .filter(|inner| !inner.forked() && inner.is_mapped())
        .map(|inner| RegionStats { owner: inner.owner.clone(), bytes: inner.bytes, pinned: inner.pinned })
        .collect()
}

/// Pins as wished: what it got, what holds it, and why no more.
fn pinned(
    mapping: &Mapping,
    pin: Pin,
    keep_going: KeepGoing<'_>,
) -> Result<(Pinned, Option<Registration>, Option<String>)> {
    let register = |search| {
        // SAFETY: the registration is dropped before the mapping, see `Pages`.
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

/// `mlock`, or the reason and the remedy; an error only where it was interrupted.
fn lock(mapping: &Mapping, keep_going: KeepGoing<'_>) -> Result<std::result::Result<(), String>> {
    let Err(errno) = mapping.lock(keep_going)? else { return Ok(Ok(())) };
    let (soft, hard) = memory_limits().memlock;
    let bytes = mapping.bytes();
    Ok(Err(match (errno, soft) {
        (Errno::NOMEM | Errno::AGAIN | Errno::PERM, Some(soft)) => format!(
            "mlock of {bytes} bytes is past RLIMIT_MEMLOCK (soft limit {soft} bytes, hard limit {}, both for the whole \
             process); raise it with `ulimit -l`, `memlock` in /etc/security/limits.conf, LimitMEMLOCK= in systemd, or \
             `docker run --ulimit memlock=-1`",
            hard.map_or_else(|| "unlimited".into(), |hard| format!("{hard} bytes"))
        ),
        _ => format!("mlock of {bytes} bytes failed: {}", io::Error::from(errno)),
    }))
}
