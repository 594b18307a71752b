//! Describes stores with every kind of parameter, runs engines on these stores on simulated devices, and reads the
//! stores' contents.

use std::{
    num::NonZeroUsize,
    slice,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use memascend_engine::{
    Application, Cause, Check, Engine, First, Function, FunctionInput, Gradient, GradientSource, Hyperparameters,
    Momentum, Options, Rule, WideState,
};
use memascend_mem::{Pin, Wait};
use memascend_nvme::{
    Options as VolumeOptions, Volume,
    sim::{self, Faults, Rng, SimDisk},
};
use memascend_store::{
    Buffer, COMPACT, Commit, Create, Description, Dtype, Durability, Format, Kind, Record, StateTensor, Store,
};

pub(crate) const MOMENTS: [(&str, Dtype); 2] = [("exp_avg", Dtype::F32), ("exp_avg_sq", Dtype::F32)];
pub(crate) const MASTER_AND_MOMENTS: [(&str, Dtype); 3] = [("master", Dtype::F32), MOMENTS[0], MOMENTS[1]];

pub(crate) fn ok<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Returns `all` if `MEMASCEND_TEST_LONG` is set, and `few` otherwise. The values are numbers of cases, or distances
/// between tested cases.
pub(crate) fn many<T>(all: T, few: T) -> T {
    if std::env::var_os("MEMASCEND_TEST_LONG").is_some() { all } else { few }
}

// --- stores ------------------------------------------------------------------------------

/// Describes a parameter of one dimension. Its gradients are spilled in the dtype of its values.
pub(crate) fn parameter(name: &str, dtype: Dtype, numel: u64, format: Format, state: &[(&str, Dtype)]) -> Record {
    let tensor =
        |&(name, dtype): &(&str, Dtype)| StateTensor { name: name.into(), dtype, shape: vec![numel], grain: 1 };
    Record {
        name: name.into(),
        kind: Kind::Parameter,
        unit: 0,
        dtype,
        shape: vec![numel],
        order: vec![],
        spill: Some(dtype),
        format,
        state: state.iter().map(tensor).collect(),
    }
}

/// Describes a store with these records. Each unit of the store has `each` records; the last unit may have fewer.
pub(crate) fn description(records: Vec<Record>, each: usize) -> Description {
    let units = (0..records.len().div_ceil(each)).map(|number| format!("unit {number}"));
    let placed = records.into_iter().enumerate();
    Description {
        chunk_elements: 2048,
        user_bytes_max: 0,
        hyperparameters_bytes_max: 0,
        optimizer: "AdamW".into(),
        units: units.collect(),
        records: placed
            .map(|(number, record)| Record { unit: u32::try_from(number / each).unwrap_or(0), ..record })
            .collect(),
        first_elements: vec![],
    }
}

pub(crate) fn volume(disks: &[SimDisk], faults: &Faults) -> Volume {
    ok(sim::open(disks, faults, &VolumeOptions::default()))
}

/// Returns the first contents of a record. Its `tensors` state tensors start as zeros.
pub(crate) fn first(values: Vec<u8>, tensors: usize, step: u64) -> First {
    let state = std::iter::repeat_with(|| None).take(tensors).collect();
    First { values: Box::new(values), state, wide: WideState::default(), step }
}

pub(crate) fn adam(lr: f64, step: u64) -> Hyperparameters {
    Hyperparameters {
        lr,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        decoupled: true,
        step,
        grad_scale: 0.25,
        maximize: false,
        seed: 11,
    }
}

/// For each record, the number of updates that it has had, and the bytes of its tensors.
pub(crate) type Contents = Vec<(u64, Vec<Vec<u8>>)>;

pub(crate) fn contents(store: &Store) -> Contents {
    let of = |record| {
        let mut tensors: Vec<Vec<u8>> =
            ok(store.tensor_bytes(record)).into_iter().map(|bytes| vec![0; bytes]).collect();
        ok(store.read_record(record, &mut tensors.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>()));
        (ok(store.record_state(record)).step, tensors)
    };
    (0..store.description().records.len()).map(of).collect()
}

/// Returns a function that calls `before`, and then replaces every float32 `x` of a chunk by `to(x)`.
pub(crate) fn changing(
    before: impl Fn() -> Result<(), Cause> + Send + Sync + 'static,
    to: fn(f32) -> f32,
) -> Box<Function> {
    Box::new(move |chunk| {
        before()?;
        for part in chunk.state.iter().chain([&chunk.values]) {
            // SAFETY: the function owns the chunk's memory during the call, and `part` is one tensor of the chunk.
            let bytes = unsafe { slice::from_raw_parts_mut(part.as_ptr().as_ptr(), part.len()) };
            for number in bytes.chunks_exact_mut(4) {
                let changed = to(f32::from_le_bytes([number[0], number[1], number[2], number[3]]));
                number.copy_from_slice(&changed.to_le_bytes());
            }
        }
        Ok(())
    })
}

// --- runs of every kind of parameter --------------------------------------------------------

const COUNT: usize = 11;
pub(crate) const ALL: [usize; COUNT] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
/// `SGD` names the records that SGD updates, and `MOMENTUM` names the records that have a momentum. `NESTEROV` is the
/// record with Nesterov's momentum.
const SGD: [usize; 5] = [4, 7, 8, 9, 10];
const MOMENTUM: [usize; 3] = [4, 7, 10];
const NESTEROV: usize = 10;
/// The records whose tensors are all float32.
const FLOATS: [usize; 3] = [0, 7, 8];

/// Describes records with different dtypes, formats and optimizers. Records have several chunks, one chunk or no chunk.
/// The spilled gradients of the last record have another dtype than the values of this record.
pub(crate) fn kinds() -> Description {
    let momentum = [("momentum_buffer", Dtype::F32)];
    let in_format = |name, numel, format, momentum| {
        let record = parameter(name, Dtype::Bf16, numel, format, &[]);
        Record { state: ok(record.state_in(format, momentum)), ..record }
    };
    let records = vec![
        parameter("float32", Dtype::F32, 5000, Format::Plain, &MOMENTS),
        parameter("compact", Dtype::Bf16, 6151, Format::Compact, &COMPACT),
        parameter("float16", Dtype::F16, 2049, Format::Plain, &MASTER_AND_MOMENTS),
        in_format("8 bits", 4500, Format::CompactEightBit, false),
        in_format("momentum of 8 bits", 2100, Format::CompactEightBit, true),
        in_format("by chance", 13, Format::StochasticBf16, false),
        parameter("nothing", Dtype::Bf16, 0, Format::Compact, &COMPACT),
        parameter("SGD", Dtype::F32, 4100, Format::Plain, &momentum),
        parameter("no state", Dtype::F32, 2100, Format::Plain, &[]),
        parameter("a master", Dtype::F16, 13, Format::Plain, &MASTER_AND_MOMENTS[..1]),
        Record {
            spill: Some(Dtype::F32),
            ..parameter("Nesterov's", Dtype::Bf16, 2049, Format::Plain, &[MASTER_AND_MOMENTS[0], momentum[0]])
        },
    ];
    description(records, 3)
}

/// Returns `count` random numbers of a dtype, with magnitudes below 2.
pub(crate) fn numbers(seed: u64, dtype: Dtype, count: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut one = || {
        let drawn = u16::try_from(rng.below(65_536)).unwrap_or(0);
        match dtype {
            Dtype::F32 => (f32::from(drawn) / 32_768.0 - 1.0).to_le_bytes().to_vec(),
            Dtype::F16 => (drawn & 0x83ff | 0x3c00).to_le_bytes().to_vec(),
            _ => (drawn & 0x807f | 0x3f00).to_le_bytes().to_vec(),
        }
    };
    (0..count).flat_map(|_| one()).collect()
}

fn values(record: usize, seed: u64) -> Vec<u8> {
    let described = &kinds().records[record];
    numbers(seed << 8 | record as u64, described.dtype, described.elements())
}

pub(crate) fn gradient(record: usize, seed: u64) -> Gradient {
    let described = &kinds().records[record];
    let dtype = described.spill.unwrap_or(described.dtype);
    ok(Gradient::new(Box::new(numbers(seed << 8 | record as u64, dtype, described.elements())), dtype))
}

/// Returns the rule for update number `step` of a record. The rule is Adam, SGD with momentum, or SGD without momentum.
pub(crate) fn rule(record: usize, step: u64) -> Rule {
    let lr = 1e-2 / f64::from(u32::try_from(step).unwrap_or(1));
    if !SGD.contains(&record) {
        return adam(lr, step).into();
    }
    // Update 4 of records 7 and 10 uses no momentum, although their state has one. The stored momentum must then stay
    // unchanged.
    let has_momentum = MOMENTUM.contains(&record) && (record == 4 || step != 4);
    Momentum {
        lr,
        momentum: if has_momentum { 0.9 } else { 0.0 },
        dampening: if record == NESTEROV { 0.0 } else { 0.1 },
        weight_decay: if record == 9 { 0.0 } else { 0.1 },
        nesterov: record == NESTEROV && has_momentum,
        step,
        grad_scale: 0.25,
        maximize: record == 8,
        seed: 11,
    }
    .into()
}

/// The options of a run.
#[derive(Debug, Clone)]
pub(crate) struct RunPlan {
    pub(crate) durability: Durability,
    pub(crate) held: Vec<usize>,
    pub(crate) log_steps: u32,
    /// Records whose updates may be deferred.
    pub(crate) deferred: Vec<usize>,
}

impl RunPlan {
    /// A plan in which every step is durable, no record is kept in RAM, and no update is deferred.
    pub(crate) fn streamed() -> Self {
        Self { durability: Durability::Step, held: vec![], log_steps: 0, deferred: vec![] }
    }

    /// A plan that keeps all records in RAM.
    pub(crate) fn held(durability: Durability, log_steps: u32) -> Self {
        Self { durability, held: ALL.to_vec(), log_steps, deferred: vec![] }
    }

    /// A plan that keeps no record in RAM, and that may defer every update.
    pub(crate) fn deferring(durability: Durability) -> Self {
        Self { durability, deferred: ALL.to_vec(), ..Self::streamed() }
    }
}

/// A run, and the simulated disk with its store.
pub(crate) struct Life {
    pub(crate) disk: SimDisk,
    pub(crate) engine: Engine,
}

fn how(durability: Durability) -> Create {
    let mut how = Create::default();
    (how.durability, how.uuid) = (durability, Some([7; 16]));
    how
}

pub(crate) fn opened(disk: &SimDisk, faults: &Faults, durability: Durability) -> memascend_store::Result<Store> {
    Store::open_on(volume(slice::from_ref(disk), faults), 8192, &how(durability))
}

/// Starts an engine on `store`. Replays the log, reads the records that the run keeps in RAM, and reserves room for
/// deferred updates and for a new log, as `plan` says.
pub(crate) fn begun(store: Store, plan: &RunPlan) -> memascend_engine::Result<Engine> {
    let mut options = Options::default();
    options.threads = NonZeroUsize::new(3).unwrap_or(NonZeroUsize::MIN);
    (options.whole_bytes, options.whole_next_bytes) = (1 << 17, 1 << 17);
    let store = Arc::new(store);
    store.hold(&plan.held, Pin::Off, &mut || true)?;
    let engine = Engine::new(Arc::clone(&store), &options)?;
    engine.replay(&mut |_, _| true)?;
    store.refresh(&plan.held, &mut |_, _| true)?;
    assert_eq!(store.keep_places(&plan.deferred)?, !plan.deferred.is_empty());
    if plan.durability != Durability::None && plan.log_steps > 0 {
        let spill = |&record: &usize| Some((record, store.description().records[record].spill?));
        let records: Vec<_> = plan.held.iter().filter_map(spill).collect();
        assert_eq!(store.keep_log(&records, plan.log_steps)?, plan.log_steps);
    }
    Ok(engine)
}

impl Life {
    pub(crate) fn new(plan: &RunPlan) -> Self {
        let disk = SimDisk::new(4 << 20);
        let volume = volume(slice::from_ref(&disk), &Faults::default());
        let store = ok(Store::create_on(volume, 8192, kinds(), &how(plan.durability)));
        let engine = ok(begun(store, &RunPlan { log_steps: 0, ..plan.clone() }));
        for record in ALL {
            ok(engine.fill(record, first(values(record, 0), kinds().records[record].state.len(), 0), Wait::forever()));
        }
        ok(engine.commit(Commit::default(), Wait::forever()));
        drop(engine);
        Self::opened(disk, plan)
    }

    pub(crate) fn opened(disk: SimDisk, plan: &RunPlan) -> Self {
        let store = ok(opened(&disk, &Faults::default(), plan.durability));
        Self { engine: ok(begun(store, plan)), disk }
    }

    /// Ends the run without a commit and without closing the store, as a kill does. Returns the disk.
    pub(crate) fn killed(self) -> SimDisk {
        self.engine.close();
        self.disk
    }

    pub(crate) fn store(&self) -> &Arc<Store> {
        self.engine.store()
    }

    pub(crate) fn contents(&self) -> Contents {
        contents(self.store())
    }

    /// Returns the [`Check`] of each record's spilled gradient. The entry of a record without a spilled gradient is
    /// `None`.
    pub(crate) fn spilled(&self) -> Vec<Option<Check>> {
        ALL.map(|record| self.engine.spilled(record, Wait::forever()).ok()).into()
    }

    pub(crate) fn commit(&self, step: u64) -> memascend_engine::Result<u64> {
        self.engine.commit(Commit { step, ..Commit::default() }, Wait::forever())
    }

    /// Queues an update of every record. For some records, passes the gradient to the update. For the other records,
    /// spills the gradient first.
    pub(crate) fn update_all(&self, step: u64) -> memascend_engine::Result<()> {
        for record in ALL {
            let by = if (step + record as u64).is_multiple_of(4) {
                self.engine.spill(record, gradient(record, step), false, Wait::forever())?;
                GradientSource::Spilled(vec![0.3, 1.7])
            } else {
                GradientSource::Given(gradient(record, step))
            };
            let count = self.store().record_state(record)?.step + 1;
            self.engine.update(record, by, None, rule(record, count), Wait::forever())?;
        }
        Ok(())
    }
}

/// Returns an application of a function that halves all tensors of a record, and a counter of the function's calls.
/// With `whole`, the function gets the whole record at once, otherwise chunk by chunk. With `after_commit`, the
/// function runs after the commit.
pub(crate) fn halving(step: u64, (whole, after_commit): (bool, bool)) -> (Application, Arc<AtomicUsize>) {
    let calls = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&calls);
    let before = move || {
        counted.fetch_add(1, Relaxed);
        Ok(())
    };
    let function = changing(before, |number| 0.5 * number);
    let input = if whole { FunctionInput::Whole } else { FunctionInput::InChunks };
    (Application { function, nbytes: 0, step, spilled: false, input, after_commit }, calls)
}

/// Makes a random step that `number` determines. The step has updates, sums of spilled gradients, functions, fills and
/// discards.
pub(crate) fn random_step(engine: &Engine, number: u64) -> memascend_engine::Result<()> {
    let (store, mut rng, mut touched) = (engine.store(), Rng::new(number << 16), Vec::new());
    for record in ALL {
        engine.drop_spilled(record, Wait::forever())?;
        let count = store.record_state(record)?.step + 1;
        let given = |seed: u64| GradientSource::Given(gradient(record, number * 2 + seed));
        match rng.below(9) {
            // The step does not update this record.
            0 => continue,
            1..=3 => engine.update(record, given(0), None, rule(record, count), Wait::forever())?,
            4 => {
                // Discards an update. In half of the cases, makes another update of the record.
                engine.update(record, given(1), None, rule(record, count), Wait::forever())?;
                engine.discard_record(record, Wait::forever())?;
                if rng.below(2) == 0 {
                    engine.update(record, given(0), None, rule(record, count), Wait::forever())?;
                }
            }
            5 => {
                engine.spill(record, gradient(record, number), false, Wait::forever())?;
                engine.spill(record, gradient(record, number + 1), true, Wait::forever())?;
                engine.update(
                    record,
                    GradientSource::Spilled(vec![0.3, 0.7]),
                    None,
                    rule(record, count),
                    Wait::forever(),
                )?;
            }
            6 | 7 if FLOATS.contains(&record) => {
                let how = (rng.below(2) == 0, rng.below(2) == 0);
                engine.apply(record, halving(count, how).0, None, Wait::forever())?;
            }
            _ => {
                // Fills the record, as loading a checkpoint does.
                let tensors = store.description().records[record].state.len();
                engine.fill(record, first(values(record, number), tensors, count), Wait::forever())?;
            }
        }
        touched.push(record);
    }
    let ends = rng.below(7);
    if ends < 2 {
        engine.finish(Wait::forever())?;
    }
    if ends == 0 {
        return engine.discard(Wait::forever());
    }
    if let (1, Some(&record)) = (ends, touched.first()) {
        engine.discard_record(record, Wait::forever())?;
    }
    engine.commit(Commit { step: number, ..Commit::default() }, Wait::forever()).map(drop)
}
