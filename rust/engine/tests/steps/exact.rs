//! Tests that updates through the engine give the same bits as direct calls of the kernels. Also tests that a fault
//! fails only the step in which it happens.

use std::sync::Arc;

use memascend_engine::{Engine, Gradient, GradientSource, Options};
use memascend_math::{AdamState, Bf16, Element, Exec, F16, Floats, FloatsMut, adam as update};
use memascend_mem::Wait;
use memascend_nvme::{
    Action, Options as VolumeOptions, Volume,
    sim::{self, Faults, Rng, SimDisk},
};
use memascend_store::{Buffer, COMPACT, Commit, Create, Description, Dtype, Format, Record, Store};

use crate::setup::{
    Life, MASTER_AND_MOMENTS, MOMENTS, RunPlan, adam, contents, description, first, many, numbers, ok, parameter, rule,
    size,
};

/// The errno that a failing device returns.
const EIO: i32 = 5;
/// The numbers of elements of the records: one element, primes, exactly one chunk, one element more than a chunk, and
/// no elements.
const SIZES: [u64; 6] = [1, 13, 2048, 2049, 6151, 0];
const DTYPES: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

fn kernels() -> Description {
    let record = |(dtype, numel): (Dtype, u64)| {
        let state: &[(&str, Dtype)] = if dtype == Dtype::F32 { &MOMENTS } else { &MASTER_AND_MOMENTS };
        Record { spill: None, ..parameter(&format!("{}.{numel}", dtype.name()), dtype, numel, Format::Plain, state) }
    };
    let compact = |numel: u64| {
        let name = format!("compact.{numel}");
        Record { spill: None, ..parameter(&name, Dtype::Bf16, numel, Format::Compact, &COMPACT) }
    };
    let plain = DTYPES.into_iter().flat_map(|dtype| SIZES.map(|numel| record((dtype, numel))));
    let records: Vec<Record> = plain.chain(SIZES.map(compact)).collect();
    let each = records.len();
    description(records, each)
}

/// A parameter in memory: master weights, both moments, and 16-bit values.
#[derive(Debug, Clone, PartialEq)]
struct InMemory {
    master: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
    half: Vec<u16>,
}

fn number(rng: &mut Rng) -> f32 {
    f32::from(u16::try_from(rng.below(65_536)).unwrap_or(0)) / 32_768.0 - 1.0
}

fn begun(record: &Record, rng: &mut Rng) -> InMemory {
    let numel = size(record.elements());
    let master: Vec<f32> = (0..numel).map(|_| number(rng)).collect();
    // Only a compact record needs its 16-bit values here. The first update of another 16-bit record overwrites the
    // values without reading them, so they start as 0. A float32 record does not use them.
    let half = master.iter().map(|&value| if record.is_compact() { Bf16::from_f32(value).0 } else { 0 }).collect();
    InMemory { master, exp_avg: vec![0.0; numel], exp_avg_sq: vec![0.0; numel], half }
}

fn bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns the bytes that an extent must have in the store if `held` is the record's state.
fn extent(store: &Store, record: usize, index: u32, held: &InMemory) -> Vec<u8> {
    let (description, chunks) = (store.description(), store.layout().chunks_of(record));
    let chunk = index % chunks;
    let elements = description.elements_of_chunk(record, chunk);
    let here = chunk as usize * 2048..chunk as usize * 2048 + elements;
    let full = size(store.layout().extent(description, record, index).bytes());
    let mut extent = vec![0; full];
    let dtype = description.records[record].dtype;
    if index < chunks {
        let values = match dtype {
            Dtype::F32 => bytes(&held.master[here]),
            _ => held.half[here].iter().flat_map(|value| value.to_le_bytes()).collect(),
        };
        extent[..values.len()].copy_from_slice(&values);
    } else if description.records[record].is_compact() {
        // `rest` has the lower halves of the master weights, and the values are the upper halves, rounded. If a value
        // was rounded up, the sign of its second moment is negative.
        let master = &held.master[here.clone()];
        let rest = master.iter().flat_map(|value| value.to_le_bytes()[..2].to_vec()).collect();
        let went_up = |value: f32| u32::from(Bf16::from_f32(value).0) != value.to_bits() >> 16;
        let signed = held.exp_avg_sq[here.clone()].iter().zip(master);
        let signed: Vec<f32> = signed.map(|(&moment, &value)| if went_up(value) { -moment } else { moment }).collect();
        let tensors = [rest, bytes(&held.exp_avg[here]), bytes(&signed)];
        for ((_, start, nbytes), tensor) in description.in_chunk(record, elements).zip(tensors) {
            extent[start..start + nbytes].copy_from_slice(&tensor);
        }
    } else {
        let all = [&held.master, &held.exp_avg, &held.exp_avg_sq];
        let tensors = &all[usize::from(dtype == Dtype::F32)..];
        for ((_, start, nbytes), tensor) in description.in_chunk(record, elements).zip(tensors) {
            extent[start..start + nbytes].copy_from_slice(&bytes(&tensor[here.clone()]));
        }
    }
    extent
}

fn fill(store: &Store, all: &[InMemory]) {
    for (record, held) in all.iter().enumerate() {
        ok(store.begin(record, 0, Wait::forever()));
        for index in 0..store.layout().extents_of(record) {
            let write = store.stage(record, index, extent(store, record, index, held));
            ok(write.and_then(memascend_store::StepWrite::wait));
        }
    }
    ok(store.commit(Commit::default(), Wait::forever()));
}

/// Returns the names of the extents in `store` that differ from the parameters in memory.
fn differing(store: &Store, all: &[InMemory]) -> Vec<String> {
    let mut differing = Vec::new();
    for (record, held) in all.iter().enumerate() {
        for index in 0..store.layout().extents_of(record) {
            let wanted = extent(store, record, index, held);
            let read = store.read(record, index, vec![0; wanted.len()]).and_then(memascend_store::ExtentRead::wait);
            let (got, _) = ok(read);
            // The comparison includes the padding of an extent, which must be zeros in the store, too.
            if got != wanted {
                differing.push(format!("{} extent {index}", store.description().records[record].name));
            }
        }
    }
    differing
}

/// Returns the gradient of a record as bytes of `dtype`.
fn gradient(record: usize, dtype: Dtype, numel: usize, step: u64) -> Vec<u8> {
    let mut rng = Rng::new(step * 1000 + record as u64);
    let values: Vec<f32> = (0..numel).map(|_| number(&mut rng)).collect();
    let half = |round: fn(f32) -> u16| values.iter().flat_map(|&value| round(value).to_le_bytes()).collect();
    match dtype {
        Dtype::F32 => bytes(&values),
        Dtype::Bf16 => half(|value| Bf16::from_f32(value).0),
        _ => half(|value| F16::from_f32(value).0),
    }
}

fn halves(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

/// Updates a parameter in memory by a direct call of the kernel.
fn reference(held: &mut InMemory, dtype: Dtype, grad: &[u8], step: u64) {
    let scalars = ok(adam(1e-2, step).scalars());
    let exec = ok(Exec::new(std::num::NonZeroUsize::MIN));
    let InMemory { master, exp_avg, exp_avg_sq, half } = held;
    let state = AdamState { master, exp_avg, exp_avg_sq };
    let result = match dtype {
        Dtype::F32 => {
            let grad: Vec<f32> = grad.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            update(state, Floats::F32(&grad), None, &scalars, exec)
        }
        Dtype::Bf16 => {
            let grad: Vec<Bf16> = halves(grad).into_iter().map(Bf16).collect();
            let mut out = vec![Bf16(0); half.len()];
            let result = update(state, Floats::Bf16(&grad), Some(FloatsMut::Bf16(&mut out)), &scalars, exec);
            *half = out.into_iter().map(|value| value.0).collect();
            result
        }
        _ => {
            let grad: Vec<F16> = halves(grad).into_iter().map(F16).collect();
            let mut out = vec![F16(0); half.len()];
            let result = update(state, Floats::F16(&grad), Some(FloatsMut::F16(&mut out)), &scalars, exec);
            *half = out.into_iter().map(|value| value.0).collect();
            result
        }
    };
    ok(result);
}

/// Returns how many updates a record has had, including the update of this step. Returns `None` if the step does not
/// update the record. A quarter of the records are updated in every third step, and record 2 is never updated.
fn touched(record: usize, step: u64) -> Option<u64> {
    match record % 4 {
        0 | 3 => Some(step),
        1 => step.is_multiple_of(3).then_some(step / 3),
        _ => (record != 2).then_some(step),
    }
}

struct Training {
    engine: Engine,
    held: Vec<InMemory>,
}

fn striped(disks: &[SimDisk], faults: &Faults) -> Volume {
    let mut options = VolumeOptions::default();
    options.stripe_bytes = Some(8192);
    ok(sim::open(disks, faults, &options))
}

fn opened(disks: &[SimDisk]) -> Store {
    ok(Store::open_on(striped(disks, &Faults::default()), 8192, &Create::default()))
}

fn engine(store: Arc<Store>, chunks: usize) -> Engine {
    let mut options = Options::default();
    options.chunks = chunks;
    options.queue_bytes_max = 20_000;
    ok(Engine::new(store, &options))
}

fn training(disks: &[SimDisk], chunks: usize) -> Training {
    let volume = striped(disks, &Faults::default());
    let store = Arc::new(ok(Store::create_on(volume, 8192, kernels(), &Create::default())));
    let mut rng = Rng::new(3);
    let held: Vec<InMemory> = store.description().records.iter().map(|record| begun(record, &mut rng)).collect();
    fill(&store, &held);
    Training { engine: engine(store, chunks), held }
}

impl Training {
    /// Queues the updates of a step, and waits until the engine has staged all of them.
    fn backward(&self, step: u64) -> memascend_engine::Result<()> {
        let store = Arc::clone(self.engine.store());
        for (record, described) in store.description().records.iter().enumerate() {
            let Some(update) = touched(record, step) else { continue };
            let numel = size(described.elements());
            let bytes = gradient(record, described.dtype, numel, step);
            let gradient = Gradient::new(Box::new(bytes), described.dtype)?;
            // In every second step, compact records get their values from memory.
            let live = (described.is_compact() && step.is_multiple_of(2)).then(|| {
                let halves: Vec<u8> = self.held[record].half.iter().flat_map(|half| half.to_le_bytes()).collect();
                Box::new(halves) as Box<dyn Buffer>
            });
            self.engine.update(record, GradientSource::Given(gradient), live, adam(1e-2, update), Wait::forever())?;
        }
        self.engine.finish(Wait::forever())
    }

    fn commit(&mut self, step: u64) -> memascend_engine::Result<()> {
        self.engine.commit(Commit { step, ..Commit::default() }, Wait::forever())?;
        self.advance(step);
        Ok(())
    }

    /// Makes the updates of the step on the parameters in memory.
    fn advance(&mut self, step: u64) {
        for (record, described) in kernels().records.iter().enumerate() {
            let Some(update) = touched(record, step) else { continue };
            let bytes = gradient(record, described.dtype, size(described.elements()), step);
            reference(&mut self.held[record], described.dtype, &bytes, update);
        }
    }
}

fn disks() -> Vec<SimDisk> {
    vec![SimDisk::new(1 << 20), SimDisk::new(1 << 20)]
}

#[test]
fn hundred_steps_have_the_bits_of_updates_in_memory() {
    for chunks in [2, 4, 7] {
        let mut training = training(&disks(), chunks);
        for step in 1..=100 {
            if step % 10 == 7 {
                // Stages the updates of another step and discards them. They must change nothing.
                ok(training.backward(step + 1000));
                ok(training.engine.discard(Wait::forever()));
            }
            ok(training.backward(step));
            ok(training.commit(step));
        }
        assert_eq!(differing(training.engine.store(), &training.held), Vec::<String>::new(), "{chunks} chunks");
        let counters = training.engine.counters();
        assert!(counters.updates > 1000 && counters.state_read == counters.state_written, "{counters:?}");
    }
}

#[test]
fn device_error_is_reported_once_and_the_repeated_step_is_exact() {
    for seed in 0..many(60, 20) {
        let disks = disks();
        let Training { engine: first, held } = training(&disks, 4);
        drop(first);
        let errors = vec![(Action::Write, EIO, 6), (Action::Read, EIO, 6)];
        let volume = striped(&disks, &Faults { seed, errors, reorder: true, ..Faults::default() });
        // Opening the store also reads from the disks, so these faults can make it fail.
        let Ok(store) = Store::open_on(volume, 8192, &Create::default()).map(Arc::new) else { continue };
        let mut training = Training { engine: engine(store, 4), held };
        let (mut step, mut failures) = (1, 0);
        while step <= 6 && failures < 40 {
            let result = training.backward(step).and_then(|()| training.commit(step));
            match result {
                Ok(()) => step += 1,
                Err(error) => {
                    failures += 1;
                    let said = error.to_string();
                    assert!(said.contains("errno 5") && !said.contains("only be discarded"), "seed {seed}: {said}");
                    let again = training.engine.finish(Wait::forever());
                    if let Err(again) = again {
                        assert!(again.to_string().contains("only be discarded"), "seed {seed}: {again}");
                    }
                    if training.engine.discard(Wait::forever()).is_err() {
                        break;
                    }
                }
            }
        }
        // Opens the store without faults. It must have the committed steps, and may have the step whose commit failed.
        let Training { engine, held } = training;
        engine.close();
        drop(engine);
        let store = opened(&disks);
        let last = store.info().step;
        assert!(last + 1 == step || last == step, "seed {seed}");
        if last + 1 == step {
            assert_eq!(differing(&store, &held), Vec::<String>::new(), "seed {seed}");
        }
    }
}

#[test]
fn update_error_names_the_bad_record_size_dtype_or_closed_engine() {
    let training = training(&disks(), 2);
    let update = |record: usize, bytes: usize, dtype| {
        let gradient = Gradient::new(Box::new(vec![0_u8; bytes]), dtype)?;
        training.engine.update(record, GradientSource::Given(gradient), None, adam(1e-2, 1), Wait::forever())
    };
    let text = |result: memascend_engine::Result<()>| result.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(text(update(99, 2, Dtype::Bf16)).contains("record 99"));
    assert!(text(update(1, 2, Dtype::Bf16)).contains("has 1 elements, not 13"));
    assert!(text(update(1, 26, Dtype::I16)).contains("int16"));
    training.engine.close();
    assert!(text(update(1, 26, Dtype::Bf16)).contains("closed"));
    training.engine.close();
}

#[test]
fn power_loss_at_any_request_leaves_a_complete_step() {
    // Cuts the power after 0 requests in the first run, and after `many(1, 11)` more requests in each further run. Ends
    // with the first run that completes before the power is cut.
    let base = disks();
    let Training { engine: first, held } = training(&base, 4);
    drop(first);
    let image: Vec<Vec<u8>> = base.iter().map(SimDisk::bytes).collect();
    let copies = || image.iter().cloned().map(SimDisk::of).collect::<Vec<SimDisk>>();
    let mut points = 0;
    loop {
        let disks = copies();
        let faults = Faults { dies_after: Some(points), ..Faults::default() };
        let store = Store::open_on(striped(&disks, &faults), 8192, &Create::default());
        let mut done = 0;
        let mut tried = 0;
        let mut states = vec![held.clone()];
        if let Ok(store) = store {
            let mut training = Training { engine: engine(Arc::new(store), 4), held: held.clone() };
            for step in 1..=2 {
                if training.backward(step).is_err() {
                    break;
                }
                tried = step;
                // Advances the reference even if the commit failed, because the store may have the step although the
                // commit returned an error.
                let committed = training.commit(step).is_ok();
                if !committed {
                    training.advance(step);
                }
                states.push(training.held.clone());
                if !committed {
                    break;
                }
                done = step;
            }
        }
        for loss in 0..many(3, 2) {
            let left: Vec<SimDisk> = disks.iter().map(|disk| disk.after_power_loss(loss)).collect();
            let store = opened(&left);
            let step = store.info().step;
            assert!(step == done || step == tried, "point {points}, loss {loss}: {step}, {done} done, {tried} tried");
            let state = &states[size(step)];
            assert_eq!(differing(&store, state), Vec::<String>::new(), "point {points}, loss {loss}");
        }
        if done == 2 {
            break;
        }
        points += many(1, 11);
    }
    assert!(points > 60, "{points}");
}

#[test]
fn fill_without_a_master_copies_the_master_from_the_values() {
    let life = Life::new(&RunPlan::streamed());
    let (_, tensors) = &life.contents()[2];
    let masters = tensors[1].chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    let values = tensors[0].chunks_exact(2).map(|bytes| F16(u16::from_le_bytes([bytes[0], bytes[1]])).to_f32());
    assert!(masters.eq(values));
}

#[test]
fn update_rejects_values_that_differ_from_the_last_commit() {
    let life = Life::new(&RunPlan::streamed());
    let (_, tensors) = &life.contents()[1];
    let mut changed = tensors[0].clone();
    changed[700] ^= 1;
    for (values, is_fine) in [(tensors[0].clone(), true), (changed, false)] {
        let (by, values): (_, Box<dyn Buffer>) =
            (GradientSource::Given(crate::setup::gradient(1, 1)), Box::new(values));
        ok(life.engine.update(1, by, Some(values), rule(1, 1), Wait::forever()));
        match life.engine.finish(Wait::forever()) {
            Ok(()) => assert!(is_fine),
            Err(error) => assert!(error.to_string().contains("are not those of the last commit"), "{error}"),
        }
        ok(life.engine.discard(Wait::forever()));
    }
}

#[test]
fn shard_draws_the_random_numbers_of_its_place_in_the_parameter() {
    let run = |first_element: u64, numel: u64| {
        let drawn = |seed| numbers(seed, Dtype::Bf16, 2048).repeat(size(numel / 2048));
        let record = parameter("by chance", Dtype::Bf16, numel, Format::StochasticBf16, &[]);
        let record = Record { state: ok(record.state_in(Format::StochasticBf16, false)), ..record };
        let tensors = record.state.len();
        let described = Description { first_elements: vec![first_element], ..description(vec![record], 1) };
        let volume = striped(&[SimDisk::new(1 << 20)], &Faults::default());
        let engine = engine(Arc::new(ok(Store::create_on(volume, 8192, described, &Create::default()))), 4);
        ok(engine.fill(0, first(drawn(1), tensors, 0), Wait::forever()));
        ok(engine.commit(Commit::default(), Wait::forever()));
        let by = GradientSource::Given(ok(Gradient::new(Box::new(drawn(2)), Dtype::Bf16)));
        ok(engine.update(0, by, None, adam(1e-2, 1), Wait::forever()));
        ok(engine.commit(Commit { step: 1, ..Commit::default() }, Wait::forever()));
        contents(engine.store()).remove(0).1.remove(0)
    };
    // Two equal chunks of a parameter must draw different random numbers. A shard that begins at the second chunk must
    // draw the same numbers as the second chunk does in the whole parameter.
    let chunks = run(0, 4096);
    assert!(chunks[4096..] == run(2048, 2048)[..]);
    assert!(chunks[..4096] != chunks[4096..]);
}
