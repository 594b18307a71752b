//! Benchmarks I/O through `io_uring`, through threads and on striped files. Measures the bandwidth, the latency and the
//! processor time, and can compare these numbers with fio.
//!
//! `python -m benchmarks.peers.bench_io` compares our I/O with fio and with the aio of `DeepSpeed`.

mod fio;
mod target;
mod wishes;

use std::{
    collections::VecDeque,
    error::Error,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use memascend_mem::{ChunkRing, HugePages, OnFork, Pin, Region, Wait, huge_pages, page_bytes};
use memascend_nvme::{BackendChoice, Options, Shared, Ticket, Volume};

use crate::{
    fio::Fio,
    target::{MARK, Target},
    wishes::{HELP, Pattern, Wishes},
};

/// For unaligned memory, a block begins this many bytes after the start of its chunk.
const SHIFT: usize = 64;

/// A configuration to measure: target, backend and memory alignment.
struct Way<'a> {
    name: &'static str,
    target: &'a Target,
    backend: BackendChoice,
    shift: usize,
}

/// The result of one pass.
#[derive(Clone, Copy)]
struct Sample {
    /// Gigabytes per second.
    speed: f64,
    /// Milliseconds of processor time per gigabyte.
    cpu: f64,
    /// Mean latency in milliseconds, from the call until the buffer has returned.
    latency: f64,
    /// 99th percentile of the latency, in milliseconds.
    slowest: f64,
}

fn main() -> ExitCode {
    // `--test` asks a benchmark to test itself. This benchmark has no tests, so it ends at once.
    if std::env::args().any(|argument| argument == "--test") {
        return ExitCode::SUCCESS;
    }
    match measure_all() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            drop(writeln!(io::stderr(), "{error}"));
            ExitCode::FAILURE
        }
    }
}

fn measure_all() -> Result<(), Box<dyn Error>> {
    let Some(wishes) = Wishes::read(std::env::args().skip(1))? else {
        return Ok(writeln!(io::stdout(), "{HELP}")?);
    };
    let folder = std::env::var_os("MEMASCEND_BENCH_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let one = Target::new(if wishes.paths.is_empty() { std::slice::from_ref(&folder) } else { &wishes.paths })?;
    let two = Target::new(&[folder.clone(), folder])?;
    let way = |name, target, backend, shift| Way { name, target, backend, shift };
    let ring = way("ring", &one, BackendChoice::IoUring, 0);
    let threads = way("threads", &one, BackendChoice::Threads, 0);
    let ways = if wishes.paths.is_empty() && wishes.backends.is_empty() {
        let striped = way("ring, two files", &two, BackendChoice::IoUring, 0);
        vec![ring, threads, striped, way("ring, unaligned memory", &one, BackendChoice::IoUring, SHIFT)]
    } else {
        let wanted = |way: &Way<'_>| wishes.backends.is_empty() || wishes.backends.contains(&way.backend);
        [ring, threads].into_iter().filter(wanted).collect()
    };
    measure(&wishes, &ways)
}

fn measure(wishes: &Wishes, ways: &[Way<'_>]) -> Result<(), Box<dyn Error>> {
    let most = wishes.blocks.iter().max().zip(wishes.depths.iter().max());
    let fio = match most.filter(|_| wishes.fio) {
        Some((block, depth)) => Some(Fio::new(block * depth)?),
        None => None,
    };
    let peer = fio.as_ref().map_or(ways[0].name, Fio::name);
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "{:>7} {:>5} {:<7} {:<24} {:>6} {:>9} {:>8} {:>8} {:>9}   ours / {peer}",
        "KiB", "depth", "pattern", "way", "GB/s", "ratio", "mean ms", "p99 ms", "CPU ms/GB"
    )?;
    // Rounds the size of the region up to whole huge pages if the system has huge pages. On small pages, the device
    // would see each block as many segments.
    let whole = if let HugePages::Of(nbytes) = huge_pages() { nbytes } else { page_bytes() };
    for &block in &wishes.blocks {
        for &depth in &wishes.depths {
            let nbytes = ((block + 4096) * depth).next_multiple_of(whole);
            let region = Region::new(nbytes, Pin::Off, OnFork::Wipe, "bench")?;
            let chunks = ChunkRing::new(&region, block + 4096, depth)?;
            // Run one write pass for each way and drop its sample: the first write to reserved space is slower.
            for way in ways {
                run(way, &chunks, Pattern::Write, (block, depth), wishes.nbytes)?;
            }
            for &pattern in &wishes.patterns {
                let mut samples = vec![Vec::new(); ways.len() + usize::from(fio.is_some())];
                for _ in 0..wishes.rounds {
                    for (way, samples) in ways.iter().zip(&mut samples) {
                        samples.push(run(way, &chunks, pattern, (block, depth), wishes.nbytes)?);
                    }
                    if let Some(fio) = &fio {
                        let paths = &ways[0].target.paths;
                        samples[ways.len()].push(fio.run(paths, pattern, (block, depth), wishes.nbytes)?);
                    }
                }
                // Each ratio compares two passes of the same round, because a disturbance is likely to slow all passes
                // of a round.
                let peers: &[Sample] = if fio.is_some() { &samples[ways.len()] } else { &samples[0] };
                let names = ways.iter().map(|way| way.name).chain(fio.as_ref().map(Fio::name));
                for (name, own) in names.zip(&samples) {
                    let of = |value: fn(&Sample) -> f64| median(own.iter().map(value));
                    let ratio = median(own.iter().zip(peers).map(|(own, peer)| own.speed / peer.speed));
                    writeln!(
                        out,
                        "{:>7} {depth:>5} {:<7} {name:<24} {:>6.2} {ratio:>9.2} {:>8.3} {:>8.3} {:>9.1}",
                        block >> 10,
                        pattern.name(),
                        of(|sample| sample.speed),
                        of(|sample| sample.latency),
                        of(|sample| sample.slowest),
                        of(|sample| sample.cpu),
                    )?;
                }
            }
        }
    }
    Ok(())
}

/// Opens the volume of `way` and moves `nbytes` once, in blocks of `block` bytes, with up to `depth` blocks in flight.
/// Moves only whole blocks. Returns the measurements.
fn run(
    way: &Way<'_>,
    chunks: &ChunkRing,
    pattern: Pattern,
    (block, depth): (usize, usize),
    nbytes: u64,
) -> Result<Sample, Box<dyn Error>> {
    let mut options = Options::default();
    options.size_bytes = way.target.size_bytes(nbytes);
    options.queue_depth = Some(depth);
    options.backend = way.backend;
    let volume = Volume::open(&way.target.paths, &options)?;
    let blocks = nbytes / block as u64;
    if volume.size_bytes() < blocks * block as u64 {
        return Err(format!(
            "the volume has {} bytes, fewer than --bytes {nbytes}: pass a smaller --bytes",
            volume.size_bytes()
        )
        .into());
    }
    let owner = chunks.owner("bench")?;
    let mut idle = Vec::new();
    for _ in 0..depth {
        let mut lease = chunks.lease(owner, Wait::never())?;
        for piece in lease.as_mut_slice()[way.shift..].chunks_exact_mut(MARK.len()) {
            piece.copy_from_slice(MARK);
        }
        idle.push(Shared::new(lease).part(way.shift, block).ok_or("a chunk is smaller than a block")?);
    }
    let mut flying: VecDeque<(Instant, Ticket<Shared>)> = VecDeque::new();
    let mut latencies = Vec::new();
    let (began, cpu) = (Instant::now(), cpu_seconds());
    for index in 0..blocks {
        if idle.is_empty() {
            let (part, latency) = next(&mut flying)?;
            idle.push(part);
            latencies.push(latency);
        }
        let part = idle.pop().ok_or("no lease")?;
        let offset = index * block as u64;
        let writes = pattern == Pattern::Write || pattern == Pattern::Mixed && index % 2 == 1;
        let asked = Instant::now();
        let ticket = if writes { volume.write(part, offset) } else { volume.read(part, offset) };
        flying.push_back((asked, ticket.map_err(|refused| refused.error)?));
    }
    while !flying.is_empty() {
        latencies.push(next(&mut flying)?.1);
    }
    let seconds = began.elapsed().as_secs_f64();
    let used = cpu_seconds() - cpu;
    // `Duration` converts bytes to gigabytes: a nanosecond stands for a byte, so a second stands for a gigabyte.
    let gigabytes = Duration::from_nanos(blocks * block as u64).as_secs_f64();
    latencies.sort_unstable_by(f64::total_cmp);
    Ok(Sample {
        speed: gigabytes / seconds,
        cpu: used * 1e3 / gigabytes,
        latency: latencies.iter().sum::<f64>() / f64::from(u32::try_from(latencies.len())?),
        slowest: latencies[latencies.len() * 99 / 100],
    })
}

/// Takes an operation that has ended. If no operation has ended, waits for the oldest operation. Returns the
/// operation's buffer, and its latency in milliseconds.
fn next(flying: &mut VecDeque<(Instant, Ticket<Shared>)>) -> Result<(Shared, f64), Box<dyn Error>> {
    let ended = flying.iter().position(|(_, ticket)| ticket.is_done()).unwrap_or(0);
    let (asked, ticket) = flying.remove(ended).ok_or("nothing in flight")?;
    let finished = ticket.wait();
    finished.result?;
    Ok((finished.buffer, asked.elapsed().as_secs_f64() * 1e3))
}

fn cpu_seconds() -> f64 {
    let mut used = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `used` has room for the `rusage` that the call writes.
    let result = unsafe { libc::getrusage(libc::RUSAGE_SELF, used.as_mut_ptr()) };
    assert_eq!(result, 0, "getrusage");
    // SAFETY: `getrusage` returned 0, so it filled `used`.
    let used = unsafe { used.assume_init() };
    let seconds = |time: libc::timeval| {
        let whole = Duration::from_secs(time.tv_sec.unsigned_abs());
        (whole + Duration::from_micros(time.tv_usec.unsigned_abs())).as_secs_f64()
    };
    seconds(used.ru_utime) + seconds(used.ru_stime)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}
