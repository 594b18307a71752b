//! Trains the same parameters through the engine and in memory, and says which pieces differ.

use std::sync::Arc;

use memascend_engine::{By, Engine, Gradient, Hyperparameters, Options};
use memascend_math::{AdamState, Bf16, Element, Exec, F16, Floats, FloatsMut, adam};
use memascend_mem::Wait;
use memascend_nvme::{
    Options as VolumeOptions, Volume,
    sim::{self, Faults, Rng, SimDisk},
};
use memascend_store::{Buffer, COMPACT, Commit, Create, Description, Dtype, Entry, Format, Kind, StateTensor, Store};

/// One element, primes, a chunk, one more than a chunk, nothing at all.
pub(crate) const SIZES: [u64; 6] = [1, 13, 2048, 2049, 6151, 0];
pub(crate) const DTYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

pub(crate) fn entries() -> Vec<Entry> {
    let entry = |(dtype, numel): (Dtype, u64)| {
        let names: &[&str] =
            if dtype == Dtype::F32 { &["exp_avg", "exp_avg_sq"] } else { &["master", "exp_avg", "exp_avg_sq"] };
        let tensor =
            |name: &&str| StateTensor { name: (*name).into(), dtype: Dtype::F32, shape: vec![numel], grain: 1 };
        Entry {
            name: format!("{}.{numel}", dtype.name()),
            kind: Kind::Parameter,
            unit: 0,
            dtype,
            shape: vec![numel],
            order: vec![],
            spill: None,
            format: Format::Plain,
            state: names.iter().map(tensor).collect(),
        }
    };
    let compact = |numel: u64| Entry {
        name: format!("compact.{numel}"),
        state: COMPACT
            .map(|(name, dtype)| StateTensor { name: name.into(), dtype, shape: vec![numel], grain: 1 })
            .into(),
        format: Format::Compact,
        ..entry((Dtype::Bf16, numel))
    };
    DTYPES.into_iter().flat_map(|dtype| SIZES.map(|numel| entry((dtype, numel)))).chain(SIZES.map(compact)).collect()
}

pub(crate) fn description() -> Description {
    Description {
        chunk_elements: 2048,
        user_bytes_max: 0,
        hyperparameters_bytes_max: 0,
        optimizer: "AdamW".into(),
        units: vec!["all".into()],
        entries: entries(),
        first_elements: vec![],
    }
}

/// A parameter in memory: master, moments, values.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct InMemory {
    master: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
    half: Vec<u16>,
}

pub(crate) fn number(rng: &mut Rng) -> f32 {
    f32::from(u16::try_from(rng.below(65_536)).unwrap_or(0)) / 32_768.0 - 1.0
}

pub(crate) fn begun(entry: &Entry, rng: &mut Rng) -> InMemory {
    let numel = usize::try_from(entry.elements()).unwrap_or(0);
    let master: Vec<f32> = (0..numel).map(|_| number(rng)).collect();
    // The values of the others are not looked at before their first update.
    let half = master.iter().map(|&value| if entry.is_compact() { Bf16::from_f32(value).0 } else { 0 }).collect();
    InMemory { master, exp_avg: vec![0.0; numel], exp_avg_sq: vec![0.0; numel], half }
}

pub(crate) fn bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// What a piece of an entry must hold.
pub(crate) fn piece(store: &Store, entry: usize, index: u32, held: &InMemory) -> Vec<u8> {
    let (description, chunks) = (store.description(), store.layout().chunks_of(entry));
    let chunk = index % chunks;
    let elements = description.elements_of_chunk(entry, chunk);
    let here = chunk as usize * 2048..chunk as usize * 2048 + elements;
    let full = usize::try_from(store.layout().piece(description, entry, index).bytes()).unwrap_or(0);
    let mut piece = vec![0; full];
    let dtype = description.entries[entry].dtype;
    if index < chunks {
        let values = match dtype {
            Dtype::F32 => bytes(&held.master[here]),
            _ => held.half[here].iter().flat_map(|value| value.to_le_bytes()).collect(),
        };
        piece[..values.len()].copy_from_slice(&values);
    } else if description.entries[entry].is_compact() {
        // Of each master the lower half, and in the sign of the second moment whether its upper half was rounded up.
        let master = &held.master[here.clone()];
        let rest = master.iter().flat_map(|value| value.to_le_bytes()[..2].to_vec()).collect();
        let went_up = |value: f32| u32::from(Bf16::from_f32(value).0) != value.to_bits() >> 16;
        let signed = held.exp_avg_sq[here.clone()].iter().zip(master);
        let signed: Vec<f32> = signed.map(|(&moment, &value)| if went_up(value) { -moment } else { moment }).collect();
        let tensors = [rest, bytes(&held.exp_avg[here]), bytes(&signed)];
        for ((_, start, nbytes), tensor) in description.in_chunk(entry, elements).zip(tensors) {
            piece[start..start + nbytes].copy_from_slice(&tensor);
        }
    } else {
        let all = [&held.master, &held.exp_avg, &held.exp_avg_sq];
        let tensors = &all[usize::from(dtype == Dtype::F32)..];
        for ((_, start, nbytes), tensor) in description.in_chunk(entry, elements).zip(tensors) {
            piece[start..start + nbytes].copy_from_slice(&bytes(&tensor[here.clone()]));
        }
    }
    piece
}

pub(crate) fn fill(store: &Store, all: &[InMemory]) {
    for (entry, held) in all.iter().enumerate() {
        store.begin(entry, 0, Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
        for index in 0..store.layout().pieces_of(entry) {
            let write = store.stage(entry, index, piece(store, entry, index, held));
            write.and_then(memascend_store::StepWrite::wait).unwrap_or_else(|error| panic!("{error}"));
        }
    }
    store.commit(Commit::default(), Wait::forever()).unwrap_or_else(|error| panic!("{error}"));
}

/// Where two states differ: entries whose pieces are not what they must be.
pub(crate) fn differing(store: &Store, all: &[InMemory]) -> Vec<String> {
    let mut differing = Vec::new();
    for (entry, held) in all.iter().enumerate() {
        for index in 0..store.layout().pieces_of(entry) {
            let wanted = piece(store, entry, index, held);
            let read = store.read(entry, index, vec![0; wanted.len()]).and_then(memascend_store::PieceRead::wait);
            let (got, _) = read.unwrap_or_else(|error| panic!("{error}"));
            // What lies between the tensors of a state piece and after them is nobody's.
            if got != wanted {
                differing.push(format!("{} piece {index}", store.description().entries[entry].name));
            }
        }
    }
    differing
}

pub(crate) fn hyperparameters(step: u64) -> Hyperparameters {
    Hyperparameters {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        decoupled: true,
        step,
        grad_scale: 0.5,
        maximize: false,
        seed: 0,
    }
}

/// The gradient of an entry, as bytes of its own dtype.
pub(crate) fn gradient(entry: usize, dtype: Dtype, numel: usize, step: u64) -> Vec<u8> {
    let mut rng = Rng::new(step * 1000 + entry as u64);
    let values: Vec<f32> = (0..numel).map(|_| number(&mut rng)).collect();
    let half = |round: fn(f32) -> u16| values.iter().flat_map(|&value| round(value).to_le_bytes()).collect();
    match dtype {
        Dtype::F32 => bytes(&values),
        Dtype::Bf16 => half(|value| Bf16::from_f32(value).0),
        _ => half(|value| F16::from_f32(value).0),
    }
}

pub(crate) fn halves(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

pub(crate) fn reference(held: &mut InMemory, dtype: Dtype, grad: &[u8], step: u64) {
    let scalars = hyperparameters(step).scalars().unwrap_or_else(|error| panic!("{error}"));
    let exec = Exec::new(std::num::NonZeroUsize::MIN).unwrap_or_else(|error| panic!("{error}"));
    let InMemory { master, exp_avg, exp_avg_sq, half } = held;
    let state = AdamState { master, exp_avg, exp_avg_sq };
    let result = match dtype {
        Dtype::F32 => {
            let grad: Vec<f32> = grad.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            adam(state, Floats::F32(&grad), None, &scalars, exec)
        }
        Dtype::Bf16 => {
            let grad: Vec<Bf16> = halves(grad).into_iter().map(Bf16).collect();
            let mut out = vec![Bf16(0); half.len()];
            let result = adam(state, Floats::Bf16(&grad), Some(FloatsMut::Bf16(&mut out)), &scalars, exec);
            *half = out.into_iter().map(|value| value.0).collect();
            result
        }
        _ => {
            let grad: Vec<F16> = halves(grad).into_iter().map(F16).collect();
            let mut out = vec![F16(0); half.len()];
            let result = adam(state, Floats::F16(&grad), Some(FloatsMut::F16(&mut out)), &scalars, exec);
            *half = out.into_iter().map(|value| value.0).collect();
            result
        }
    };
    result.unwrap_or_else(|error| panic!("{error}"));
}

/// Which entries a step touches, and as which update: experts idle, some are frozen.
pub(crate) fn touched(entry: usize, step: u64) -> Option<u64> {
    match entry % 4 {
        0 | 3 => Some(step),
        1 => step.is_multiple_of(3).then_some(step / 3),
        _ => (entry != 2).then_some(step),
    }
}

pub(crate) struct Training {
    pub(crate) engine: Engine,
    pub(crate) held: Vec<InMemory>,
}

pub(crate) fn volume(disks: &[SimDisk], faults: &Faults) -> Volume {
    let mut options = VolumeOptions::default();
    options.stripe_bytes = Some(8192);
    sim::open(disks, faults, &options).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn opened(disks: &[SimDisk], faults: &Faults) -> Arc<Store> {
    Arc::new(Store::open_on(volume(disks, faults), 8192, &Create::default()).unwrap_or_else(|error| panic!("{error}")))
}

pub(crate) fn engine(store: Arc<Store>, chunks: usize) -> Engine {
    let mut options = Options::default();
    options.chunks = chunks;
    options.queue_bytes_max = 20_000;
    Engine::new(store, &options).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn training(disks: &[SimDisk], chunks: usize) -> Training {
    let store = Store::create_on(volume(disks, &Faults::default()), 8192, description(), &Create::default());
    let store = Arc::new(store.unwrap_or_else(|error| panic!("{error}")));
    let mut rng = Rng::new(3);
    let held: Vec<InMemory> = store.description().entries.iter().map(|entry| begun(entry, &mut rng)).collect();
    fill(&store, &held);
    Training { engine: engine(store, chunks), held }
}

impl Training {
    /// Queues the updates of a step.
    pub(crate) fn backward(&self, step: u64) -> memascend_engine::Result<()> {
        let store = Arc::clone(self.engine.store());
        for (entry, described) in store.description().entries.iter().enumerate() {
            let Some(update) = touched(entry, step) else { continue };
            let numel = usize::try_from(described.elements()).unwrap_or(0);
            let bytes = gradient(entry, described.dtype, numel, step);
            let gradient = Gradient::new(Box::new(bytes), described.dtype)?;
            // Every other time from where they are resident.
            let live = (described.is_compact() && step.is_multiple_of(2)).then(|| {
                let halves: Vec<u8> = self.held[entry].half.iter().flat_map(|half| half.to_le_bytes()).collect();
                Box::new(halves) as Box<dyn Buffer>
            });
            self.engine.update(entry, By::Given(gradient), live, hyperparameters(update), Wait::forever())?;
        }
        self.engine.finish(Wait::forever())
    }

    pub(crate) fn commit(&mut self, step: u64) -> memascend_engine::Result<()> {
        self.engine.commit(Commit { step, ..Commit::default() }, Wait::forever())?;
        let store = Arc::clone(self.engine.store());
        for (entry, described) in store.description().entries.iter().enumerate() {
            let Some(update) = touched(entry, step) else { continue };
            let numel = usize::try_from(described.elements()).unwrap_or(0);
            let bytes = gradient(entry, described.dtype, numel, step);
            reference(&mut self.held[entry], described.dtype, &bytes, update);
        }
        Ok(())
    }
}

pub(crate) fn disks() -> Vec<SimDisk> {
    vec![SimDisk::new(1 << 20), SimDisk::new(1 << 20)]
}
