//! A step of `AdamW` on SSD against the same bytes moved through the same volume without arithmetic or checksums, and
//! against fio where it is installed; interleaved rounds, medians.
//!
//! `MEMASCEND_BENCH_DIR` says where (default: here), `MEMASCEND_BENCH_MPARAMS` how many millions of parameters,
//! `MEMASCEND_BENCH_LAYOUT` which layout: whole (the default), compact, or resident: compact, and the values are given.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Instant,
};

use memascend_engine::{CHUNKS_DEFAULT, Engine, Gradient, Hyperparameters, Options};
use memascend_mem::{ChunkRing, OnFork, Pin, Region, Wait};
use memascend_nvme::{Options as VolumeOptions, Ticket, Volume};
use memascend_store::{
    Buffer, COMPACT, Commit, Create, Description, Dtype, Entry, Existing, Kind, Shared, StateTensor, Store,
};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const ENTRIES: usize = 8;
const ROUNDS: usize = 5;
const VALUE_BYTES: usize = 2;

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// How an entry's state is stored, and whether an update is given the values.
#[derive(Clone, Copy)]
struct Layout {
    state: [(&'static str, Dtype); 3],
    is_compact: bool,
    is_resident: bool,
}

impl Layout {
    fn asked() -> Self {
        let asked = std::env::var("MEMASCEND_BENCH_LAYOUT").unwrap_or_default();
        let (is_compact, is_resident) = (matches!(asked.as_str(), "compact" | "resident"), asked == "resident");
        let whole = ["master", "exp_avg", "exp_avg_sq"].map(|name| (name, Dtype::F32));
        Self { state: if is_compact { COMPACT } else { whole }, is_compact, is_resident }
    }

    fn name(self) -> &'static str {
        match (self.is_compact, self.is_resident) {
            (false, _) => "bf16",
            (true, false) => "compact bf16",
            (true, true) => "compact, resident bf16",
        }
    }

    fn state_bytes(self) -> usize {
        self.state.iter().map(|(_, dtype)| usize::try_from(dtype.bytes()).unwrap_or(0)).sum()
    }

    /// Bytes of values that an update reads of a parameter.
    fn read_bytes(self) -> usize {
        if self.is_compact && !self.is_resident { VALUE_BYTES } else { 0 }
    }
}

fn description(numel: u64, chunk_elements: u32, layout: Layout) -> Description {
    let tensor = |(name, dtype): (&str, Dtype)| StateTensor { name: name.into(), dtype, shape: vec![numel] };
    let entry = |index: usize| Entry {
        name: format!("weight.{index}"),
        kind: Kind::Parameter,
        unit: 0,
        dtype: Dtype::Bf16,
        shape: vec![numel],
        order: vec![],
        spill: None,
        state: layout.state.map(tensor).to_vec(),
    };
    Description {
        chunk_elements,
        user_bytes_max: 64 << 10,
        hyperparameters_bytes_max: 64 << 10,
        optimizer: "AdamW".into(),
        units: vec!["all".into()],
        entries: (0..ENTRIES).map(entry).collect(),
    }
}

fn hyperparameters(step: u64) -> Hyperparameters {
    Hyperparameters {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        decoupled: true,
        step,
        grad_scale: 1.0,
        maximize: false,
    }
}

/// A gradient that all entries share: the engine only reads it.
struct Borrowed(Arc<Vec<u8>>);

// SAFETY: the vector lives as long as any clone, and nobody writes to it.
unsafe impl Buffer for Borrowed {
    fn as_ptr(&self) -> std::ptr::NonNull<u8> {
        std::ptr::NonNull::from(self.0.as_slice()).cast()
    }
    fn len(&self) -> usize {
        self.0.len()
    }
}

/// Fills a store with zeros, as the first step does.
fn filled(path: &Path, numel: u64, chunk_elements: u32, layout: Layout) -> Outcome<Store> {
    let mut how = Create::default();
    how.existing = Existing::Replace;
    let (store, _) = Store::create(&[path], description(numel, chunk_elements, layout), &how)?;
    let tensors: Vec<Vec<u8>> = store.tensor_bytes(0)?.into_iter().map(|bytes| vec![0; bytes]).collect();
    let tensors: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
    for entry in 0..ENTRIES {
        store.stage_entry(entry, 0, &tensors, Wait::forever())?;
    }
    store.commit(Commit::default(), Wait::forever())?;
    Ok(store)
}

/// The values of the first entry.
fn values(store: &Store) -> Outcome<Arc<Vec<u8>>> {
    let mut tensors: Vec<Vec<u8>> = store.tensor_bytes(0)?.into_iter().map(|bytes| vec![0; bytes]).collect();
    store.read_entry(0, &mut tensors.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>())?;
    Ok(Arc::new(tensors.swap_remove(0)))
}

type Moving = (Shared, Ticket<Shared>, Option<Ticket<Shared>>);

/// Reads each chunk's state and writes its state and values to the other slot: as many in flight, nothing computed.
fn pure(
    volume: &Volume,
    ring: &ChunkRing,
    (chunks, elements): (usize, usize),
    slot: usize,
    layout: Layout,
) -> Outcome<()> {
    let owner = ring.owner("pure")?;
    let (state, values) = (elements * layout.state_bytes(), elements * VALUE_BYTES);
    let values_at = 2 * chunks * state;
    let read = |part: Option<Shared>, from: usize| -> Outcome<Ticket<Shared>> {
        let part = part.ok_or("a chunk that is too small")?;
        Ok(volume.read(part, from as u64).map_err(|refused| refused.error)?)
    };
    let mut reading: VecDeque<(usize, Moving)> = VecDeque::new();
    let mut writing: VecDeque<[Ticket<Shared>; 2]> = VecDeque::new();
    let mut begun = 0;
    while begun < chunks || !reading.is_empty() {
        while begun < chunks && reading.len() < CHUNKS_DEFAULT / 2 {
            if reading.len() + writing.len() == CHUNKS_DEFAULT {
                for ticket in writing.pop_front().into_iter().flatten() {
                    ticket.wait().result?;
                }
            }
            let memory = Shared::new(ring.lease(owner, Wait::forever())?);
            let index = slot * chunks + begun;
            let half = (layout.read_bytes() > 0)
                .then(|| read(memory.part(state, values), values_at + index * values))
                .transpose()?;
            let ticket = read(memory.part(0, state), index * state)?;
            reading.push_back((begun, (memory, ticket, half)));
            begun += 1;
        }
        let Some((index, (memory, ticket, half))) = reading.pop_front() else { break };
        if let Some(half) = half {
            half.wait().result?;
        }
        let finished = ticket.wait();
        finished.result?;
        let other = (1 - slot) * chunks + index;
        let half = memory.part(state, values).ok_or("a chunk that is too small")?;
        let one = volume.write(finished.buffer, (other * state) as u64).map_err(|refused| refused.error)?;
        let two = volume.write(half, (values_at + other * values) as u64).map_err(|refused| refused.error)?;
        writing.push_back([one, two]);
    }
    for ticket in writing.into_iter().flatten() {
        ticket.wait().result?;
    }
    Ok(())
}

/// fio, reads and writes mixed as a step mixes them: bytes per second, and whether it had huge pages (which needs a
/// hugetlbfs with free pages). `None` where there is no fio.
fn fio(path: &Path) -> Option<(f64, bool)> {
    let huge = format!("--iomem=mmaphuge:/dev/hugepages/memascend-bench-{}", std::process::id());
    fio_with(path, &huge)
        .map(|speed| (speed, true))
        .or_else(|| fio_with(path, "--iomem=malloc").map(|speed| (speed, false)))
}

fn fio_with(path: &Path, memory: &str) -> Option<f64> {
    let done = Command::new("fio")
        .args(["--name=mixed", "--rw=rw", "--rwmixread=46", "--bs=1M", "--iodepth=4", "--ioengine=io_uring"])
        .args(["--direct=1", "--time_based", "--runtime=3", "--output-format=terse", "--terse-version=3"])
        .arg(memory)
        .arg(format!("--filename={}", path.display()))
        .output()
        .ok()
        .filter(|done| done.status.success())?;
    let text = String::from_utf8(done.stdout).ok()?;
    let fields: Vec<&str> = text.lines().find(|line| line.starts_with("3;"))?.split(';').collect();
    // Bandwidths of reads and of writes, KiB per second.
    let of = |index: usize| fields.get(index)?.parse::<f64>().ok();
    Some((of(6)? + of(47)?) * 1024.0)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[expect(clippy::print_stdout, reason = "a benchmark prints")]
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn main() -> Outcome<()> {
    let folder = std::env::var("MEMASCEND_BENCH_DIR").map_or_else(|_| PathBuf::from("."), PathBuf::from);
    let folder = folder.join(format!("memascend-bench-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let result = measure(&folder);
    std::fs::remove_dir_all(&folder)?;
    let (parameters, bytes, update, moved, committed, fio, info, staging) = result?;
    let gb = |seconds: f64| bytes as f64 / seconds / 1e9;
    let (update_s, moved_s, commit_s) = (median(update.clone()), median(moved.clone()), median(committed));
    let ratio = median(moved.iter().zip(&update).map(|(pure, update)| pure / update).collect());
    let layout = Layout::asked().name();
    println!("update of {} M {layout} parameters, {:.2} GB a step", parameters / 1_000_000, bytes as f64 / 1e9);
    println!("  update    {update_s:7.3} s  {:5.2} GB/s  {ratio:.3} of pure I/O", gb(update_s));
    println!("  pure I/O  {moved_s:7.3} s  {:5.2} GB/s", gb(moved_s));
    if let Some((fio, huge)) = fio {
        let pages = if huge { "huge pages" } else { "4 KiB pages" };
        println!("  fio, {pages:11}     {:5.2} GB/s  update is {:.3} of it", fio / 1e9, gb(update_s) * 1e9 / fio);
    }
    println!("  commit    {:7.3} ms, {:.3} % of the step", commit_s * 1e3, commit_s / update_s * 100.0);
    println!("  staging   {:.2} MiB", staging as f64 / f64::from(1 << 20));
    let mib = info.slot_bytes as f64 / f64::from(1 << 20);
    println!(
        "  index     {:.1} KiB, {:.1} bytes per MiB of state",
        info.index_bytes as f64 / 1024.0,
        info.index_bytes as f64 / mib
    );
    Ok(())
}

type Measured = (usize, usize, Vec<f64>, Vec<f64>, Vec<f64>, Option<(f64, bool)>, memascend_store::Info, usize);

fn measure(folder: &Path) -> Outcome<Measured> {
    let elements = number("MEMASCEND_BENCH_CHUNK", 65_536);
    let chunks_each = (number("MEMASCEND_BENCH_MPARAMS", 64) * 1_000_000 / ENTRIES / elements).max(1);
    let (numel, chunks) = (chunks_each * elements, chunks_each * ENTRIES);
    let layout = Layout::asked();
    let store = Arc::new(filled(&folder.join("store"), numel as u64, u32::try_from(elements)?, layout)?);
    let engine = Engine::new(Arc::clone(&store), &Options::default())?;
    let gradient = Arc::new(vec![0x3c_u8; numel * VALUE_BYTES]);
    let mut options = VolumeOptions::default();
    let chunk_bytes = elements * (layout.state_bytes() + VALUE_BYTES);
    options.size_bytes = Some((2 * chunks * chunk_bytes) as u64);
    let volume = Volume::open(&[folder.join("pure")], &options)?;
    let region = Region::new(CHUNKS_DEFAULT * chunk_bytes, Pin::Off, OnFork::Wipe, "pure")?;
    let ring = ChunkRing::new(&region, chunk_bytes, CHUNKS_DEFAULT)?;
    let mut all = (Vec::new(), Vec::new(), Vec::new());
    // The first two rounds write each slot for the first time, which is slower.
    for step in 1..=ROUNDS + 2 {
        // All entries began alike and have the same gradients, so the values of one are those of all.
        let live = if layout.is_resident { values(&store)? } else { Arc::default() };
        let began = Instant::now();
        for entry in 0..ENTRIES {
            let gradient = Gradient::new(Box::new(Borrowed(Arc::clone(&gradient))), Dtype::Bf16)?;
            let values = layout.is_resident.then(|| Box::new(Borrowed(Arc::clone(&live))) as Box<dyn Buffer>);
            engine.update_from(values, entry, gradient, &hyperparameters(step as u64), Wait::forever())?;
        }
        engine.finish(Wait::forever())?;
        let update = began.elapsed();
        let began = Instant::now();
        engine.commit(Commit { step: step as u64, ..Commit::default() }, Wait::forever())?;
        let commit = began.elapsed();
        let began = Instant::now();
        pure(&volume, &ring, (chunks, elements), step % 2, layout)?;
        let moved = began.elapsed();
        if step > 2 {
            all.0.push(update.as_secs_f64());
            all.1.push(moved.as_secs_f64());
            all.2.push(commit.as_secs_f64());
        }
    }
    volume.close(Wait::forever())?;
    drop(volume);
    let fio = fio(&folder.join("pure"));
    let bytes = chunks * elements * (2 * layout.state_bytes() + layout.read_bytes() + VALUE_BYTES);
    Ok((chunks * elements, bytes, all.0, all.1, all.2, fio, store.info(), engine.staging_bytes()))
}
