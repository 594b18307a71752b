//! Benchmarks a step of `AdamW` whose state is on an SSD. Measures each record separately, and prints medians.
//!
//! For comparison, the benchmark moves the same bytes through a volume without arithmetic or checksums. It also runs
//! fio if fio is installed.
//!
//! These environment variables configure the benchmark. The variables that end in `_LAYOUT`, `_CHUNK` and `_CHUNKS`
//! accept several values, separated by commas:
//! - `MEMASCEND_BENCH_DIR`: the folder for the files (default: the current folder).
//! - `MEMASCEND_BENCH_MPARAMS`: the number of parameters, in millions.
//! - `MEMASCEND_BENCH_ROUNDS`: the number of rounds.
//! - `MEMASCEND_BENCH_LAYOUT`: the layouts to measure: whole (the default), compact, or resident. Resident is the
//!   compact layout with updates that get the parameters' values from memory.
//! - `MEMASCEND_BENCH_CHUNK`: the number of elements in a chunk.
//! - `MEMASCEND_BENCH_CHUNKS`: the number of staging chunks.
//! - `MEMASCEND_BENCH_FIO=no`: fio does not run.

mod fio;
mod pure;
mod subject;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use memascend_engine::{CHUNKS_DEFAULT, Engine, Gradient, GradientSource, Options};
use memascend_mem::Wait;
use memascend_store::{Buffer, Commit, Dtype, Store};

use crate::{
    fio::Huge,
    pure::Pure,
    subject::{Borrowed, Layout, RECORDS, VALUE_BYTES, filled, hyperparameters, values},
};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn asked(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.into())
}

/// Measured seconds. `commit` has one entry per round. `update` and `pure` have one entry per record and round. `fio`
/// and `fio_default` have as many entries as `update`, or none.
#[derive(Default)]
struct Seconds {
    update: Vec<f64>,
    pure: Vec<f64>,
    commit: Vec<f64>,
    fio: Vec<f64>,
    fio_default: Vec<f64>,
}

/// One benchmark case: a layout, a chunk size and a number of chunks, with its measurements.
struct Case {
    layout: Layout,
    elements: usize,
    staged: usize,
    parameters: usize,
    store: Arc<Store>,
    engine: Engine,
    gradient: Arc<Vec<u8>>,
    pure: Pure,
    seconds: Seconds,
}

impl Case {
    fn new(folder: &Path, layout: Layout, (elements, staged): (usize, usize), parameters: usize) -> Outcome<Self> {
        let chunks_each = (parameters / RECORDS / elements).max(1);
        let (numel, chunks) = (chunks_each * elements, chunks_each * RECORDS);
        std::fs::create_dir(folder)?;
        let store = Arc::new(filled(&folder.join("store"), numel as u64, u32::try_from(elements)?, layout)?);
        let mut options = Options::default();
        options.chunks = staged;
        let engine = Engine::new(Arc::clone(&store), &options)?;
        let gradient = Arc::new(vec![0x3c_u8; numel * VALUE_BYTES]);
        let pure = Pure::new(folder.join("pure"), (chunks, elements), staged, layout)?;
        let parameters = chunks * elements;
        Ok(Self { layout, elements, staged, parameters, store, engine, gradient, pure, seconds: Seconds::default() })
    }

    /// Returns the number of bytes that the update of one record reads and writes.
    fn bytes_each(&self) -> usize {
        let (read, written) = self.layout.moved_bytes();
        self.parameters / RECORDS * (read + written)
    }

    /// Stages the update of a record without a commit. Returns the seconds that this took.
    fn update(&self, record: usize, step: u64, live: &Arc<Vec<u8>>) -> Outcome<f64> {
        let began = Instant::now();
        let gradient = Gradient::new(Box::new(Borrowed(Arc::clone(&self.gradient))), Dtype::Bf16)?;
        let values = self.layout.is_resident.then(|| Box::new(Borrowed(Arc::clone(live))) as Box<dyn Buffer>);
        self.engine.update(record, GradientSource::Given(gradient), values, hyperparameters(step), Wait::forever())?;
        self.engine.finish(Wait::forever())?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// Runs one step. For each record, measures the update, the plain I/O and fio directly after each other, because a
    /// disk's speed drifts within seconds. The first two steps write to some slots for the first time. These writes are
    /// slower, so the times of the first two steps are dropped.
    fn round(&mut self, step: u64, with_fio: bool, huge: Option<&Huge>) -> Outcome<()> {
        // All records start from equal values and get equal gradients, so the values of the first record are the values
        // of every record.
        let live = if self.layout.is_resident { values(&self.store)? } else { Arc::default() };
        for record in 0..RECORDS {
            let update = self.update(record, step, &live)?;
            self.seconds.update.push(update);
            let began = Instant::now();
            self.pure.record(record, usize::from(step % 2 == 1))?;
            self.seconds.pure.push(began.elapsed().as_secs_f64());
            if with_fio {
                self.seconds.fio_default.extend(self.fio(record, None)?);
                self.seconds.fio.extend(if huge.is_some() { self.fio(record, huge)? } else { None });
            }
        }
        let began = Instant::now();
        self.engine.commit(Commit { step, ..Commit::default() }, Wait::forever())?;
        self.seconds.commit.push(began.elapsed().as_secs_f64());
        if step <= 2 {
            self.seconds = Seconds::default();
        }
        Ok(())
    }

    /// Runs fio on the record's range of the file that [`Pure`] uses.
    fn fio(&self, record: usize, huge: Option<&Huge>) -> Outcome<Option<f64>> {
        let (read, written) = self.layout.moved_bytes();
        let part = self.pure.bytes() / RECORDS;
        let place = (record * part, part);
        fio::seconds((&self.pure.path, place), self.bytes_each(), (read, read + written), self.staged, huge)
    }

    #[expect(clippy::print_stdout, reason = "a benchmark prints")]
    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    fn print(&self) {
        let Seconds { update, pure, commit, fio, fio_default } = &self.seconds;
        let (parameters, bytes) = (self.parameters as f64 / 1e6, (self.bytes_each() * RECORDS) as f64 / 1e9);
        let (name, elements) = (self.layout.name(), self.elements);
        let line = |what: &str, seconds: &[f64]| {
            if !seconds.is_empty() {
                let (middle, ratio) = (median(seconds) * RECORDS as f64, ratio(seconds, update));
                println!("  {what:24} {middle:7.3} s  {:5.2} GB/s  the update is {ratio:.3} of it", bytes / middle);
            }
        };
        println!(
            "update of {parameters:.0} M {name} parameters, {elements} a chunk, {} chunks, {bytes:.2} GB a step",
            self.staged
        );
        let whole = median(update) * RECORDS as f64;
        println!("  {:24} {whole:7.3} s  {:5.2} GB/s", "update", bytes / whole);
        line("pure I/O", pure);
        line("fio, huge pages", fio);
        line("fio, as people run it", fio_default);
        println!("  commit    {:.3} ms, {:.3} % of the step", median(commit) * 1e3, median(commit) / whole * 100.0);
        println!("  staging   {:.2} MiB", self.engine.staging_bytes() as f64 / f64::from(1 << 20));
        let info = self.store.info();
        let (index, mib) = (info.index_bytes as f64, info.slot_bytes as f64 / f64::from(1 << 20));
        println!("  index     {:.1} KiB, {:.1} bytes per MiB of state", index / 1024.0, index / mib);
        let counters = self.engine.counters();
        let each = |seconds: std::time::Duration| seconds.as_secs_f64() * 1e6 / counters.chunks as f64;
        println!(
            "  a chunk   {:.0} us waits for reads (checked), {:.0} computes, {:.0} seals and begins writes, {:.0} \
             waits for writes",
            each(counters.reading),
            each(counters.computing),
            each(counters.sealing),
            each(counters.writing)
        );
    }
}

/// Returns the median of the ratios of `one` to `other`. Each ratio divides two times of the same record and round,
/// which were measured under the same conditions.
fn ratio(one: &[f64], other: &[f64]) -> f64 {
    median(&one.iter().zip(other).map(|(one, other)| one / other).collect::<Vec<_>>())
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Outcome<()> {
    let folder = PathBuf::from(asked("MEMASCEND_BENCH_DIR", "."));
    let folder = folder.join(format!("memascend-bench-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let result = measure(&folder);
    std::fs::remove_dir_all(&folder)?;
    result
}

#[expect(clippy::print_stdout, reason = "a benchmark prints")]
fn measure(folder: &Path) -> Outcome<()> {
    let parameters = asked("MEMASCEND_BENCH_MPARAMS", "64").parse::<usize>()? * 1_000_000;
    let rounds = asked("MEMASCEND_BENCH_ROUNDS", "7").parse::<u64>()?;
    let (layouts, chunks) = (asked("MEMASCEND_BENCH_LAYOUT", "whole"), asked("MEMASCEND_BENCH_CHUNK", ""));
    let staged = asked("MEMASCEND_BENCH_CHUNKS", &CHUNKS_DEFAULT.to_string());
    let mut cases = vec![];
    for layout in layouts.split(',') {
        for elements in chunks.split(',') {
            for count in staged.split(',') {
                let folder = folder.join(format!("{layout}-{elements}-{count}"));
                let layout = Layout::called(layout);
                let elements = if elements.is_empty() { layout.chunk_elements() } else { elements.parse()? };
                cases.push(Case::new(&folder, layout, (elements, count.parse()?), parameters)?);
            }
        }
    }
    let with_fio = asked("MEMASCEND_BENCH_FIO", "yes") == "yes";
    let deepest = cases.iter().map(|case| case.staged).max().unwrap_or(0);
    let huge = Huge::new(folder, deepest);
    if let Err(why) = &huge {
        println!("no fio with huge pages: {why}");
    }
    for step in 1..=rounds + 2 {
        for case in &mut cases {
            case.round(step, with_fio, huge.as_ref().ok())?;
        }
    }
    for case in cases {
        case.print();
        case.pure.close()?;
    }
    Ok(())
}
