//! Describes stores of a few parameters, opens them on simulated devices, and reads what they hold.

use memascend_engine::{First, Hyperparameters, WideState};
use memascend_nvme::{
    Options as VolumeOptions, Volume,
    sim::{self, Faults, SimDisk},
};
use memascend_store::{Description, Dtype, Entry, Format, Kind, StateTensor, Store};

pub(crate) const MOMENTS: [(&str, Dtype); 2] = [("exp_avg", Dtype::F32), ("exp_avg_sq", Dtype::F32)];
pub(crate) const MASTER_AND_MOMENTS: [(&str, Dtype); 3] = [("master", Dtype::F32), MOMENTS[0], MOMENTS[1]];

pub(crate) fn ok<T, E: std::fmt::Display>(result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// A parameter of one dimension, whose gradients spill in its own dtype.
pub(crate) fn parameter(name: &str, dtype: Dtype, numel: u64, format: Format, state: &[(&str, Dtype)]) -> Entry {
    let tensor =
        |&(name, dtype): &(&str, Dtype)| StateTensor { name: name.into(), dtype, shape: vec![numel], grain: 1 };
    Entry {
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

/// A store of units of so many entries.
pub(crate) fn description(entries: Vec<Entry>, each: usize) -> Description {
    let units = (0..entries.len().div_ceil(each)).map(|number| format!("unit {number}"));
    let placed = entries.into_iter().enumerate();
    Description {
        chunk_elements: 2048,
        user_bytes_max: 0,
        hyperparameters_bytes_max: 0,
        optimizer: "AdamW".into(),
        units: units.collect(),
        entries: placed
            .map(|(number, entry)| Entry { unit: u32::try_from(number / each).unwrap_or(0), ..entry })
            .collect(),
        first_elements: vec![],
    }
}

pub(crate) fn volume(disks: &[SimDisk], faults: &Faults) -> Volume {
    ok(sim::open(disks, faults, &VolumeOptions::default()))
}

/// First values of an entry, whose state of so many tensors is zeros.
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
        seed: 0,
    }
}

/// Of each entry its count of updates and its tensors.
pub(crate) type Contents = Vec<(u64, Vec<Vec<u8>>)>;

pub(crate) fn contents(store: &Store) -> Contents {
    let of = |entry| {
        let mut tensors: Vec<Vec<u8>> = ok(store.tensor_bytes(entry)).into_iter().map(|bytes| vec![0; bytes]).collect();
        ok(store.read_entry(entry, &mut tensors.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>()));
        (ok(store.entry_state(entry)).step, tensors)
    };
    (0..store.description().entries.len()).map(of).collect()
}
