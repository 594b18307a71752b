//! Creates the store that the benchmark updates: equal records in one of the layouts.

use std::{path::Path, sync::Arc};

use memascend_engine::Hyperparameters;
use memascend_mem::Wait;
use memascend_store::{
    Buffer, COMPACT, Commit, Create, Description, Dtype, Existing, Format, Kind, Record, StateTensor, Store,
};

use crate::Outcome;

pub(crate) const RECORDS: usize = 8;
pub(crate) const VALUE_BYTES: usize = 2;

/// How a record stores its state, and whether updates get the parameter's values from memory.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    state: [(&'static str, Dtype); 3],
    pub(crate) is_compact: bool,
    pub(crate) is_resident: bool,
}

impl Layout {
    /// Returns the layout called `name`. Any unknown name gives the layout with whole fp32 masters.
    pub(crate) fn called(name: &str) -> Self {
        let (is_compact, is_resident) = (matches!(name, "compact" | "resident"), name == "resident");
        let whole = ["master", "exp_avg", "exp_avg_sq"].map(|name| (name, Dtype::F32));
        Self { state: if is_compact { COMPACT } else { whole }, is_compact, is_resident }
    }

    pub(crate) fn name(self) -> &'static str {
        match (self.is_compact, self.is_resident) {
            (false, _) => "bf16",
            (true, false) => "compact bf16",
            (true, true) => "compact, resident bf16",
        }
    }

    /// Returns the number of elements of a chunk that Python's `chunk_elements_of` returns for this layout: the largest
    /// multiple of 2,048 whose state fits into one request of 1 MiB, but at most 98,304.
    pub(crate) fn chunk_elements(self) -> usize {
        if self.is_compact { 98_304 } else { 86_016 }
    }

    pub(crate) fn state_bytes(self) -> usize {
        self.state.iter().map(|(_, dtype)| usize::try_from(dtype.bytes()).unwrap_or(0)).sum()
    }

    /// Returns the numbers of bytes that a step reads and writes for one element.
    pub(crate) fn moved_bytes(self) -> (usize, usize) {
        (self.state_bytes() + self.read_bytes(), self.state_bytes() + VALUE_BYTES)
    }

    /// Returns the number of bytes of parameter values that an update reads from storage for one element.
    pub(crate) fn read_bytes(self) -> usize {
        if self.is_compact && !self.is_resident { VALUE_BYTES } else { 0 }
    }
}

fn description(numel: u64, chunk_elements: u32, layout: Layout) -> Description {
    let tensor = |(name, dtype): (&str, Dtype)| StateTensor { name: name.into(), dtype, shape: vec![numel], grain: 1 };
    let record = |index: usize| Record {
        name: format!("weight.{index}"),
        kind: Kind::Parameter,
        unit: 0,
        dtype: Dtype::Bf16,
        shape: vec![numel],
        order: vec![],
        spill: None,
        format: if layout.is_compact { Format::Compact } else { Format::Plain },
        state: layout.state.map(tensor).to_vec(),
    };
    Description {
        chunk_elements,
        user_bytes_max: 64 << 10,
        hyperparameters_bytes_max: 64 << 10,
        optimizer: "AdamW".into(),
        units: vec!["all".into()],
        records: (0..RECORDS).map(record).collect(),
        first_elements: vec![],
    }
}

pub(crate) fn hyperparameters(step: u64) -> Hyperparameters {
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
        seed: 0,
    }
}

/// Bytes that all records share, as their gradients or as their values. The engine only reads these bytes.
pub(crate) struct Borrowed(pub(crate) Arc<Vec<u8>>);

// SAFETY: the `Arc` keeps the vector alive, and no code writes to the vector.
unsafe impl Buffer for Borrowed {
    fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }
    fn as_mut_ptr(&mut self) -> std::ptr::NonNull<u8> {
        unreachable!("the engine only reads this buffer")
    }
    fn len(&self) -> usize {
        self.0.len()
    }
}

/// Creates a store, fills it with zeros and commits it. The commit is the state before the first step.
pub(crate) fn filled(path: &Path, numel: u64, chunk_elements: u32, layout: Layout) -> Outcome<Store> {
    let mut how = Create::default();
    how.existing = Existing::Replace;
    let (store, _) = Store::create(&[path], description(numel, chunk_elements, layout), &how)?;
    let tensors: Vec<Vec<u8>> = store.tensor_bytes(0)?.into_iter().map(|bytes| vec![0; bytes]).collect();
    let tensors: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
    for record in 0..RECORDS {
        store.stage_record(record, 0, &tensors, Wait::forever())?;
    }
    store.commit(Commit::default(), Wait::forever())?;
    Ok(store)
}

/// Reads the values of the first record.
pub(crate) fn values(store: &Store) -> Outcome<Arc<Vec<u8>>> {
    let mut tensors: Vec<Vec<u8>> = store.tensor_bytes(0)?.into_iter().map(|bytes| vec![0; bytes]).collect();
    store.read_record(0, &mut tensors.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>())?;
    Ok(Arc::new(tensors.swap_remove(0)))
}
