//! Measures how fast this crate provides host memory. Compares leases with `posix_memalign`, handing over chunks of a
//! ring with handing over numbers, and huge pages with pages of 4 KiB.
#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]
#![expect(clippy::cast_precision_loss, reason = "sizes and counts are far below 2^52")]

use std::{
    hint::black_box,
    sync::mpsc,
    time::{Duration, Instant},
};

use memascend_mem::{Arena, ChunkRing, Error, Lease, OnFork, Pin, Region, Wait};

const ROUNDS: usize = 9;
const SIZES: [usize; 3] = [4 << 10, 1 << 20, 32 << 20];
const CHUNK_BYTES: usize = 4 << 10;
const CHUNKS: usize = 16;
const HAND_OVERS: usize = 200_000;
const REGION_BYTES: usize = 1 << 30;

/// Returns the median seconds per call of each case. Each round times every case once.
fn medians<const N: usize>(cases: &mut [&mut dyn FnMut() -> f64; N]) -> [f64; N] {
    let mut samples = vec![[0.0; N]; ROUNDS];
    for round in &mut samples {
        for (sample, case) in round.iter_mut().zip(cases.iter_mut()) {
            *sample = case();
        }
    }
    std::array::from_fn(|case| {
        let mut times: Vec<f64> = samples.iter().map(|round| round[case]).collect();
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    })
}

fn seconds_per_call(calls: usize, mut call: impl FnMut()) -> f64 {
    let began = Instant::now();
    for _ in 0..calls {
        call();
    }
    began.elapsed().as_secs_f64() / calls as f64
}

fn shown(bytes: usize) -> String {
    if bytes < 1 << 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) }
}

/// Allocates memory with `posix_memalign`, calls `touch`, and frees the memory.
fn memalign(bytes: usize, touch: impl Fn(*mut u8)) {
    let mut pointer = std::ptr::null_mut();
    // SAFETY: `pointer` is valid for writes; 4096 is a power of two.
    assert_eq!(unsafe { libc::posix_memalign(&raw mut pointer, 4096, bytes) }, 0);
    touch(black_box(pointer.cast()));
    // SAFETY: `posix_memalign` allocated `pointer` above.
    unsafe { libc::free(pointer) };
}

fn fill(pointer: *mut u8, bytes: usize) {
    // SAFETY: both callers own at least `bytes` bytes from `pointer` on.
    unsafe { pointer.write_bytes(1, bytes) };
}

fn leases() -> Result<(), Error> {
    println!("lease + return, against posix_memalign + free of the same bytes\n");
    println!("{:>8}  {:>10}  {:>12}  {:>12}  {:>7}", "size", "bytes", "lease", "memalign", "ratio");
    let plan = SIZES.map(|bytes| (bytes, 1));
    let region = Region::new(SIZES.iter().sum(), Pin::Auto, OnFork::Copy, "bench")?;
    let arena = Arena::new(&region, &plan)?;
    let owner = arena.owner("bench")?;
    for bytes in SIZES {
        let lease = || arena.lease(bytes, owner, Wait::never()).unwrap_or_else(|error| panic!("{error}"));
        for (kind, touched) in [("untouched", 0), ("written", bytes)] {
            let calls = if touched == 0 { 100_000 } else { (256 << 20) / bytes };
            let [ours, theirs] = medians(&mut [
                &mut || seconds_per_call(calls, || fill(black_box(&lease()).as_ptr().as_ptr(), touched)),
                &mut || {
                    let calls = if bytes > CHUNK_BYTES { calls.min(4000) } else { calls };
                    seconds_per_call(calls, || memalign(bytes, |pointer| fill(pointer, touched)))
                },
            ]);
            let (ours_ns, theirs_ns) = (ours * 1e9, theirs * 1e9);
            println!(
                "{:>8}  {kind:>10}  {ours_ns:>9.0} ns  {theirs_ns:>9.0} ns  {:>6.1}x",
                shown(bytes),
                theirs / ours
            );
        }
    }
    Ok(())
}

/// Calls `take` in this thread and drops its values in another thread. Returns the seconds per value.
fn hand_over<T: Send>(take: impl Fn() -> T + Sync) -> f64 {
    let (sender, receiver) = mpsc::sync_channel::<T>(CHUNKS);
    std::thread::scope(|scope| {
        scope.spawn(move || receiver.into_iter().for_each(drop));
        let began = Instant::now();
        for _ in 0..HAND_OVERS {
            assert!(sender.send(take()).is_ok());
        }
        drop(sender);
        began.elapsed().as_secs_f64() / HAND_OVERS as f64
    })
}

fn ring() -> Result<(), Error> {
    let region = Region::new(CHUNK_BYTES * CHUNKS, Pin::Auto, OnFork::Copy, "bench")?;
    let ring = ChunkRing::new(&region, CHUNK_BYTES, CHUNKS)?;
    let owner = ring.owner("bench")?;
    let take = || -> Lease { ring.lease(owner, Wait::forever()).unwrap_or_else(|error| panic!("{error}")) };
    let [ours, channel] = medians(&mut [
        &mut || hand_over(take),
        // Measures the channel between the threads alone, without the ring.
        &mut || hand_over(|| 0_usize),
    ]);
    println!("\nring of {CHUNKS} chunks: taken in one thread, given back in another, handed over by a channel\n");
    println!("the channel alone      {:>6.0} ns", channel * 1e9);
    println!("with the ring          {:>6.0} ns", ours * 1e9);
    Ok(())
}

/// Makes the kernel ignore `MADV_HUGEPAGE` in this process if `off` is true, and respect it again if `off` is false.
fn without_huge_pages(off: bool) {
    // SAFETY: `prctl` with this option takes no pointer.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, libc::c_ulong::from(off), 0, 0, 0) }, 0);
}

fn populate() {
    println!("\nmap, populate and unmap {} of memory\n", shown(REGION_BYTES));
    println!("{:<28}  {:>12}  {:>12}  {:>7}", "", "huge pages", "4 KiB pages", "ratio");
    let timed = |pin, huge: bool| {
        without_huge_pages(!huge);
        let began = Instant::now();
        let region = Region::new(REGION_BYTES, pin, OnFork::Copy, "bench");
        let made = began.elapsed();
        let region = region.unwrap_or_else(|error| panic!("{error}"));
        without_huge_pages(false);
        assert!(huge || region.huge_bytes() == 0, "huge pages could not be switched off for the comparison");
        let began = Instant::now();
        drop(region);
        (made, began.elapsed())
    };
    let [mut huge, mut small] = [[Duration::ZERO; 3]; 2];
    for (index, (pin, second)) in [(Pin::Off, false), (Pin::Mlock, false), (Pin::Mlock, true)].into_iter().enumerate() {
        let pick = |(made, unmapped): (Duration, Duration)| if second { unmapped } else { made }.as_secs_f64();
        let both = medians(&mut [&mut || pick(timed(pin, true)), &mut || pick(timed(pin, false))]);
        [huge[index], small[index]] = both.map(Duration::from_secs_f64);
    }
    let rate = |time: Duration| REGION_BYTES as f64 / f64::from(1 << 30) / time.as_secs_f64();
    for (index, name) in ["populate", "populate + mlock", "unmap"].into_iter().enumerate() {
        let (with, without) = (rate(huge[index]), rate(small[index]));
        println!("{name:<28}  {with:>6.1} GiB/s  {without:>6.1} GiB/s  {:>6.1}x", with / without);
    }
}

fn main() -> Result<(), Error> {
    leases()?;
    ring()?;
    populate();
    Ok(())
}
