//! Tests regions on the real kernel: their exact sizes, guard pages, pinning, closing, and forks.

use std::time::Duration;

use memascend_mem::{Arena, Error, HugePages, OnFork, Pin, Pinned, Region, Wait, huge_pages, page_bytes, regions};

fn listed(owner: &str) -> Vec<usize> {
    regions().into_iter().filter(|region| region.owner == owner).map(|region| region.bytes).collect()
}

/// Waits until the regions of `owner` have the expected sizes. Returns false if this takes longer than a second. The
/// wait is needed because a parallel test that calls `regions()` keeps each region alive for a moment.
fn are_listed(owner: &str, expected: &[usize]) -> bool {
    (0..1000).any(|_| {
        let right = listed(owner) == expected;
        if !right {
            std::thread::sleep(Duration::from_millis(1));
        }
        right
    })
}

/// Runs `child` in a forked process. Returns 0 if `child` returned true, 1 if `child` returned false, or the negative
/// number of the signal that killed the process.
fn forked(child: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the forked process runs only `child` and `_exit`. `child` needs no other thread, and no lock that another
    // thread may have held at the fork.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        let status = i32::from(!child());
        // SAFETY: `_exit` has no conditions.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: `status` is valid for writes, and `pid` is a child of this process.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    if libc::WIFSIGNALED(status) { -libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) }
}

#[test]
fn region_bytes_are_rounded_up_to_whole_pages_only() -> Result<(), Error> {
    for bytes in [1, page_bytes(), page_bytes() + 1, 3_000_001, 5 << 20] {
        let region = Region::new(bytes, Pin::Off, OnFork::Copy, "exact")?;
        assert_eq!(region.asked_bytes(), bytes);
        assert_eq!(region.bytes(), bytes.next_multiple_of(page_bytes()));
        assert!(are_listed("exact", &[region.bytes()]), "{:?}", listed("exact"));
    }
    assert!(are_listed("exact", &[]), "{:?}", listed("exact"));
    Ok(())
}

#[test]
fn region_rejects_impossible_sizes() {
    for bytes in [0, usize::MAX, usize::MAX / 2] {
        assert!(matches!(
            Region::new(bytes, Pin::Auto, OnFork::Copy, "no"),
            Err(Error::Invalid(_) | Error::OutOfMemory { .. })
        ));
    }
    let error = Region::new(1 << 46, Pin::Auto, OnFork::Copy, "no").err();
    assert!(matches!(error, Some(Error::OutOfMemory { needed_bytes, .. }) if needed_bytes == 1 << 46), "{error:?}");
}

/// Makes a mapping with plain system calls. Returns how many bytes of the mapping the kernel puts on huge pages. A
/// region of `bytes` or more bytes must have at least as many bytes on huge pages.
#[expect(clippy::multiple_unsafe_ops_per_block, reason = "one reason holds for all unsafe calls")]
fn huge_bytes_by_hand(bytes: usize, huge: usize) -> usize {
    // SAFETY: the block advises, touches and unmaps a new anonymous mapping within its bounds.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let base = libc::mmap(std::ptr::null_mut(), bytes + huge, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(base, libc::MAP_FAILED);
        let aligned = base.cast::<u8>().wrapping_add(base.addr().next_multiple_of(huge) - base.addr());
        libc::madvise(aligned.cast(), bytes, libc::MADV_HUGEPAGE);
        for offset in (0..bytes).step_by(page_bytes()) {
            aligned.wrapping_add(offset).write_volatile(1);
        }
        let got = huge_bytes_around(aligned.addr()).min(bytes);
        libc::munmap(base, bytes + huge);
        got
    }
}

/// Finds the mapping that contains `address`. Returns how many bytes of the mapping are on huge pages.
fn huge_bytes_around(address: usize) -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let holds = |line: &&str| {
        let bounds = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text| usize::from_str_radix(text, 16);
        bounds.is_some_and(|(start, end)| {
            number(start).is_ok_and(|start| start <= address) && number(end).is_ok_and(|end| address < end)
        })
    };
    let kib = |line: &str| line.strip_prefix("AnonHugePages:")?.trim().strip_suffix(" kB")?.parse::<usize>().ok();
    smaps.lines().skip_while(|line| !holds(line)).find_map(kib).unwrap_or(0) * 1024
}

#[test]
fn large_region_uses_as_many_huge_pages_as_possible() -> Result<(), Error> {
    let HugePages::Of(huge) = huge_pages() else { return Ok(()) };
    let possible = huge_bytes_by_hand(4 * huge, huge);
    let region = Region::new(4 * huge + page_bytes(), Pin::Off, OnFork::Copy, "huge")?;
    assert!(region.huge_bytes() >= possible, "{} bytes, where plain system calls get {possible}", region.huge_bytes());
    assert_eq!(region.why_not_huge().is_none(), region.huge_bytes() == 4 * huge);
    region.close();
    assert_eq!((region.huge_bytes(), region.why_not_huge()), (0, None));
    let small = Region::new(page_bytes(), Pin::Off, OnFork::Copy, "small")?;
    assert_eq!((small.huge_bytes(), small.why_not_huge()), (0, None));
    Ok(())
}

#[test]
fn making_a_region_can_be_interrupted() {
    for pin in [Pin::Off, Pin::Auto] {
        let mut asked = 0;
        let mut keep_going = || {
            asked += 1;
            asked < 3
        };
        let made = Region::interruptible(512 << 20, pin, OnFork::Copy, "interrupted", &mut keep_going);
        assert!(matches!(made, Err(Error::Interrupted { asked_bytes }) if asked_bytes == 512 << 20));
        assert_eq!(asked, 3);
    }
    assert!(are_listed("interrupted", &[]), "{:?}", listed("interrupted"));
}

/// After a fork, calls in the child must not wait for a lock that another thread of the parent held at the fork.
#[test]
fn forked_child_never_waits_for_a_lock_held_by_the_parent() -> Result<(), Error> {
    let region = Region::new(8 << 20, Pin::Off, OnFork::Copy, "locks")?;
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let busy = || {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let other = Region::new(page_bytes(), Pin::Off, OnFork::Copy, "busy");
                let _ = (region.huge_bytes(), regions().len(), other.is_ok());
            }
        };
        scope.spawn(busy);
        scope.spawn(busy);
        for _ in 0..100 {
            let status = forked(|| {
                // If the child deadlocks, `alarm` kills it, so that the test does not hang.
                // SAFETY: `alarm` has no conditions.
                unsafe { libc::alarm(20) };
                region.close();
                let mine = Region::new(page_bytes(), Pin::Off, OnFork::Copy, "child");
                mine.is_ok_and(|mine| listed("child").len() == 1 && region.huge_bytes() == 0 && mine.bytes() > 0)
            });
            assert_eq!(status, 0);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    Ok(())
}

#[test]
fn region_reports_its_pinning_or_why_it_is_not_pinned() -> Result<(), Error> {
    let off = Region::new(page_bytes(), Pin::Off, OnFork::Copy, "off")?;
    assert_eq!((off.pinned(), off.why_not()), (Pinned::No, None));
    let auto = Region::new(page_bytes(), Pin::Auto, OnFork::Copy, "auto")?;
    assert!(auto.pinned() == Pinned::Cuda || auto.why_not().is_some_and(|why| why.contains("CUDA")));
    assert!(matches!(
        Region::new(page_bytes(), Pin::Cuda, OnFork::Copy, "cuda"),
        Ok(_) | Err(Error::PinRefused { .. })
    ));
    Ok(())
}

#[test]
fn guard_pages_stop_an_overrun_on_either_side() -> Result<(), Error> {
    let region = Region::new(3 * page_bytes(), Pin::Off, OnFork::Copy, "guards")?;
    let arena = Arena::new(&region, &[(3 * page_bytes(), 1)])?;
    let lease = arena.lease(3 * page_bytes(), arena.owner("test")?, Wait::never())?;
    let start = lease.as_ptr().as_ptr();
    let write = |offset: isize| {
        forked(|| {
            // SAFETY: the write happens in a child process. If `offset` is out of bounds, a guard page stops the write,
            // and the fault kills the child.
            unsafe { start.wrapping_offset(offset).write_volatile(1) };
            true
        })
    };
    let last = isize::try_from(lease.len() - 1).unwrap_or(0);
    assert_eq!(write(0), 0);
    assert_eq!(write(last), 0);
    assert_eq!(write(last + 1), -libc::SIGSEGV);
    assert_eq!(write(-1), -libc::SIGSEGV);
    Ok(())
}

#[test]
fn closed_region_is_unmapped_after_its_last_lease() -> Result<(), Error> {
    let region = Region::new(2 * page_bytes(), Pin::Auto, OnFork::Copy, "closing")?;
    let arena = Arena::new(&region, &[(page_bytes(), 2)])?;
    let owner = arena.owner("test")?;
    let mut lease = arena.lease(page_bytes(), owner, Wait::never())?;
    region.close();
    region.close();
    assert!(matches!(arena.lease(1, owner, Wait::never()), Err(Error::Closed)));
    assert!(matches!(Arena::new(&region, &[(1, 1)]), Err(Error::Closed)));
    lease.as_mut_slice().fill(7);
    assert_eq!(listed("closing").len(), 1);
    drop(lease);
    assert_eq!(
        listed("closing").len(),
        0,
        "the last lease must unmap the region, although `arena` and `region` still exist"
    );
    assert_eq!(region.huge_bytes(), 0);
    Ok(())
}

#[test]
fn close_ends_a_waiting_lease() -> Result<(), Error> {
    let region = Region::new(page_bytes(), Pin::Off, OnFork::Copy, "waiting")?;
    let arena = Arena::new(&region, &[(page_bytes(), 1)])?;
    let owner = arena.owner("test")?;
    let _held = arena.lease(1, owner, Wait::never())?;
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| arena.lease(1, owner, Wait::forever()).err());
        std::thread::sleep(Duration::from_millis(30));
        region.close();
        assert!(matches!(waiter.join(), Ok(Some(Error::Closed))));
    });
    Ok(())
}

#[test]
fn a_region_belongs_to_one_arena_at_a_time() -> Result<(), Error> {
    let region = Region::new(page_bytes(), Pin::Off, OnFork::Copy, "one")?;
    let arena = Arena::new(&region, &[(64, 1)])?;
    assert!(matches!(Arena::new(&region, &[(64, 1)]), Err(Error::RegionTaken)));
    let lease = arena.lease(64, arena.owner("test")?, Wait::never())?;
    drop(arena);
    assert!(matches!(Arena::new(&region, &[(64, 1)]), Err(Error::RegionTaken)), "a lease keeps its arena");
    drop(lease);
    assert!(Arena::new(&region, &[(64, 1)]).is_ok());
    Ok(())
}

#[test]
fn waiting_lease_can_be_interrupted() -> Result<(), Error> {
    let region = Region::new(page_bytes(), Pin::Off, OnFork::Copy, "giving up")?;
    let arena = Arena::new(&region, &[(64, 1)])?;
    let owner = arena.owner("test")?;
    let _held = arena.lease(64, owner, Wait::never())?;
    let mut polls = 0;
    let mut keep_waiting = || {
        polls += 1;
        polls < 3
    };
    let ended = arena.lease(64, owner, Wait { timeout: None, keep_waiting: Some(&mut keep_waiting) });
    assert!(matches!(ended, Err(Error::Interrupted { asked_bytes: 64 })));
    assert_eq!(polls, 3);
    assert_eq!(arena.stats().total.waits, 1);
    Ok(())
}

#[test]
fn on_fork_copies_or_wipes_the_childs_bytes_and_keeps_the_parents() -> Result<(), Error> {
    for (on_fork, seen) in [(OnFork::Copy, 7), (OnFork::Wipe, 0)] {
        let region = Region::new(page_bytes(), Pin::Auto, on_fork, "forked")?;
        let arena = Arena::new(&region, &[(64, 2)])?;
        let owner = arena.owner("test")?;
        let mut lease = arena.lease(64, owner, Wait::never())?;
        lease.as_mut_slice().fill(7);
        let status = forked(|| {
            let refused = matches!(arena.lease(64, owner, Wait::never()), Err(Error::Forked));
            let right = lease.as_slice().iter().all(|&byte| byte == seen);
            lease.as_mut_slice().fill(9);
            region.close();
            refused && right && listed("forked").is_empty()
        });
        assert_eq!(status, 0);
        assert!(lease.as_slice().iter().all(|&byte| byte == 7), "the child wrote into the parent's memory");
        assert!(arena.lease(64, owner, Wait::never()).is_ok(), "the child took or closed the parent's slots");
        assert_eq!(arena.stats().total.leases, 1);
    }
    Ok(())
}
