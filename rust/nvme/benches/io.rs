//! Benchmarks I/O: `io_uring` against threads, two devices against one, unaligned against aligned.
//!
//! Beside fio and `DeepSpeed`: `memascend bench io`. The folder is `MEMASCEND_BENCH_DIR`, or the system's temporary one.

use std::{
    collections::VecDeque,
    io::{self, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use memascend_mem::{ChunkRing, Lease, OnFork, Pin, Region, Wait};
use memascend_nvme::{BackendChoice, Options, Part, Volume};

const BLOCK_BYTES: usize = 1 << 20;
const DEPTH: usize = 8;
const FILE_BYTES: u64 = 1 << 30;
const ROUNDS: usize = 5;

#[derive(Clone, Copy, PartialEq)]
enum Pattern {
    Read,
    Write,
    Mixed,
}

struct Case {
    name: &'static str,
    paths: Vec<PathBuf>,
    backend: BackendChoice,
    /// How far memory and offset are off every alignment.
    shift: usize,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `cargo test` runs benches too; there is nothing to check in a measurement.
    if std::env::args().any(|argument| argument == "--test") {
        return Ok(());
    }
    let folder = std::env::var_os("MEMASCEND_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let path = |name: &str| folder.join(format!("memascend-bench-{}-{name}", std::process::id()));
    let (one, halves) = (path("one"), vec![path("left"), path("right")]);
    let result = measure(&one, &halves);
    for made in [&one, &halves[0], &halves[1]] {
        drop(std::fs::remove_file(made));
    }
    result
}

fn measure(one: &Path, halves: &[PathBuf]) -> Result<(), Box<dyn std::error::Error>> {
    let single = vec![one.to_owned()];
    let case = |name, paths: &[PathBuf], backend, shift| Case { name, paths: paths.to_vec(), backend, shift };
    let cases = [
        case("ring", &single, BackendChoice::IoUring, 0),
        case("threads", &single, BackendChoice::Threads, 0),
        case("ring, two files", halves, BackendChoice::IoUring, 0),
        case("ring, unaligned memory", &single, BackendChoice::IoUring, 64),
    ];
    let region = Region::new((BLOCK_BYTES + 4096) * DEPTH, Pin::Off, OnFork::Wipe, "bench")?;
    let chunks = ChunkRing::new(&region, BLOCK_BYTES + 4096, DEPTH)?;
    // What was only reserved is slower the first time.
    for case in &cases {
        run(case, &chunks, Pattern::Write)?;
    }
    let mut out = io::stdout().lock();
    writeln!(out, "{:<8} {:<24} {:>6} {:>14} {:>10}", "pattern", "way", "GB/s", "ring's ratio", "CPU ms/GB")?;
    for (label, pattern) in [("read", Pattern::Read), ("write", Pattern::Write), ("mixed", Pattern::Mixed)] {
        let mut samples = vec![Vec::new(); cases.len()];
        for _ in 0..ROUNDS {
            for (case, samples) in cases.iter().zip(&mut samples) {
                samples.push(run(case, &chunks, pattern)?);
            }
        }
        let medians: Vec<(f64, f64)> = samples.iter().map(|samples| medians(samples)).collect();
        for (case, (speed, cpu)) in cases.iter().zip(&medians) {
            writeln!(out, "{label:<8} {:<24} {speed:>6.2} {:>14.2} {cpu:>10.1}", case.name, medians[0].0 / speed)?;
        }
    }
    Ok(())
}

/// GB/s and ms of processor time per GB of one pass over the file.
fn run(case: &Case, chunks: &ChunkRing, pattern: Pattern) -> Result<(f64, f64), Box<dyn std::error::Error>> {
    let mut options = Options::default();
    options.size_bytes = Some(FILE_BYTES);
    options.queue_depth = Some(DEPTH);
    options.backend = case.backend;
    let volume = Volume::open(&case.paths, &options)?;
    let owner = chunks.owner("bench")?;
    let mut idle: Vec<Lease> =
        (0..DEPTH).map(|_| chunks.lease(owner, Wait::never())).collect::<Result<_, memascend_mem::Error>>()?;
    let mut flying = VecDeque::new();
    let (began, cpu) = (Instant::now(), cpu_seconds());
    let blocks = FILE_BYTES / BLOCK_BYTES as u64;
    for index in 0..blocks {
        if idle.is_empty() {
            let ticket: memascend_nvme::Ticket<Part<Lease>> = flying.pop_front().ok_or("nothing in flight")?;
            let finished = ticket.wait();
            finished.result?;
            idle.push(finished.buffer.into_inner());
        }
        let part = Part::new(idle.pop().ok_or("no lease")?, case.shift, BLOCK_BYTES)?;
        let offset = index * BLOCK_BYTES as u64;
        let writes = pattern == Pattern::Write || pattern == Pattern::Mixed && index % 2 == 1;
        let ticket = if writes { volume.write(part, offset) } else { volume.read(part, offset) };
        flying.push_back(ticket.map_err(|refused| refused.error)?);
    }
    for ticket in flying {
        ticket.wait().result?;
    }
    let seconds = began.elapsed().as_secs_f64();
    // A nanosecond for each byte: 10^9 of either are one.
    let gigabytes = Duration::from_nanos(FILE_BYTES).as_secs_f64();
    Ok((gigabytes / seconds, (cpu_seconds() - cpu) * 1e3 / gigabytes))
}

fn cpu_seconds() -> f64 {
    let mut used = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: room for the answer.
    let result = unsafe { libc::getrusage(libc::RUSAGE_SELF, used.as_mut_ptr()) };
    assert_eq!(result, 0, "getrusage");
    // SAFETY: filled by the call.
    let used = unsafe { used.assume_init() };
    let seconds = |time: libc::timeval| {
        let whole = Duration::from_secs(time.tv_sec.unsigned_abs());
        (whole + Duration::from_micros(time.tv_usec.unsigned_abs())).as_secs_f64()
    };
    seconds(used.ru_utime) + seconds(used.ru_stime)
}

fn medians(samples: &[(f64, f64)]) -> (f64, f64) {
    let middle = |mut values: Vec<f64>| {
        values.sort_unstable_by(f64::total_cmp);
        values[values.len() / 2]
    };
    (middle(samples.iter().map(|sample| sample.0).collect()), middle(samples.iter().map(|sample| sample.1).collect()))
}
