//! Tests that taking a lease and returning it never allocate memory.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    time::Duration,
};

use memascend_mem::{Arena, Error, OnFork, Pin, Region, Wait};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is forwarded to the system's allocator. The counter itself allocates no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller of `alloc` fulfils the same conditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller of `dealloc` fulfils the same conditions.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_lease_costs_no_allocation() -> Result<(), Error> {
    let region = Region::new(1 << 20, Pin::Off, OnFork::Copy, "test")?;
    let arena = Arena::new(&region, &[(4096, 4), (65_536, 2)])?;
    let owner = arena.owner("test")?;
    let before = ALLOCATIONS.get();
    for _ in 0..1000 {
        let _small = arena.lease(4000, owner, Wait::never())?;
        let _large = arena.lease(65_536, owner, Wait::forever())?;
        let _same_name = arena.owner("test")?;
    }
    assert_eq!(ALLOCATIONS.get(), before);
    Ok(())
}

#[test]
fn a_wait_costs_no_allocation() -> Result<(), Error> {
    let region = Region::new(4096, Pin::Off, OnFork::Copy, "test")?;
    let arena = Arena::new(&region, &[(4096, 1)])?;
    let owner = arena.owner("test")?;
    let held = arena.lease(4096, owner, Wait::never())?;
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let before = ALLOCATIONS.get();
            let granted = arena.lease(4096, owner, Wait::at_most(Duration::from_secs(60))).is_ok();
            (granted, ALLOCATIONS.get() - before)
        });
        std::thread::sleep(Duration::from_millis(120));
        drop(held);
        assert!(matches!(waiter.join(), Ok((true, 0))));
    });
    assert!(arena.stats().total.waited > Duration::ZERO);
    Ok(())
}
