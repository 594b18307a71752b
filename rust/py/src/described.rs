//! Python bindings of store descriptions. They compute the sizes of a store, and the state tensors of a record, without
//! a store.

use memascend_store::{Description, Dtype, Format, Kind, Record, Sizes, StateTensor};
use pyo3::prelude::*;

use crate::errors::{OrPyErr as _, config_error};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(store_state_in, module)?)?;
    module.add_function(wrap_pyfunction!(store_sizes, module)?)?;
    module.add_function(wrap_pyfunction!(store_log_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(store_places_bytes, module)?)
}

/// A tensor of a description: name, dtype, shape.
type Tensor = (String, String, Vec<u64>);
/// A record, as (is a buffer, unit, values, state, order of the dimensions, dtype of spilled gradients, format of the
/// state, first element). If the record has only some rows of a parameter, the last entry is the index of the record's
/// first element in the parameter; otherwise the last entry is `None`. If the format is `None`, the record is compact
/// if it has the tensors of a compact record, and plain otherwise.
pub(crate) type Described = (bool, u32, Tensor, Vec<Tensor>, Vec<u8>, Option<String>, Option<String>, Option<u64>);

/// The results of [`store_sizes`], in the order in which its documentation lists them.
type SizesOf = (u64, u64, u64, u64, u64, u64, Vec<u64>, Vec<(u64, u64)>);

/// Returns sizes in bytes for a store of this description: the whole store, one slot of all records, the index in
/// memory, the other memory of an open store, a staging chunk, the engine's memory for state that is not cut into
/// chunks, the values of each unit, and the (values, state) of each record.
#[pyfunction]
fn store_sizes(
    py: Python<'_>,
    records: Vec<Described>,
    units: Vec<String>,
    optimizer: String,
    chunk_elements: u32,
    devices: usize,
) -> PyResult<SizesOf> {
    let description = described(py, records, units, optimizer, chunk_elements)?;
    let sizes = description.sizes(devices, None).or_raise(py)?;
    let chunk_bytes = memascend_engine::chunk_bytes(&description);
    let other_bytes = memascend_engine::other_bytes(&description);
    let Sizes { total_bytes, slot_bytes, index_bytes, buffer_bytes, unit_bytes, record_bytes } = sizes;
    Ok((total_bytes, slot_bytes, index_bytes, buffer_bytes, chunk_bytes, other_bytes, unit_bytes, record_bytes))
}

/// Returns the size in bytes of a gradient log for the records `logged`, if each of these records is written whole once
/// in `steps` steps. Ignores records without a dtype of spilled gradients.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
fn store_log_bytes(
    py: Python<'_>,
    records: Vec<Described>,
    units: Vec<String>,
    chunk_elements: u32,
    logged: Vec<usize>,
    steps: u32,
) -> PyResult<u64> {
    let description = described(py, records, units, String::new(), chunk_elements)?;
    let spills = |&record: &usize| Some((record, description.records.get(record)?.spill?));
    Ok(description.log_bytes(&logged.iter().filter_map(spills).collect::<Vec<_>>(), steps))
}

/// Returns the bytes by which a store grows so that updates of the records `deferred` can be deferred: second places
/// for all spilled gradients, and a small log. Returns 0 if `deferred` is empty.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted arguments are owned")]
fn store_places_bytes(
    py: Python<'_>,
    records: Vec<Described>,
    units: Vec<String>,
    chunk_elements: u32,
    deferred: Vec<usize>,
) -> PyResult<u64> {
    Ok(described(py, records, units, String::new(), chunk_elements)?.places_bytes(&deferred))
}

pub(crate) fn described(
    py: Python<'_>,
    records: Vec<Described>,
    units: Vec<String>,
    optimizer: String,
    chunk_elements: u32,
) -> PyResult<Description> {
    let has_rows = records.iter().any(|record| record.7.is_some());
    let first_elements = records.iter().filter(|_| has_rows).map(|record| record.7.unwrap_or(0)).collect();
    let records = records.into_iter().map(|record| described_record(py, record));
    Ok(Description {
        chunk_elements,
        user_bytes_max: USER_BYTES_MAX,
        hyperparameters_bytes_max: HYPERPARAMETERS_BYTES_MAX,
        optimizer,
        units,
        records: records.collect::<PyResult<_>>()?,
        first_elements,
    })
}

fn described_record(py: Python<'_>, record: Described) -> PyResult<Record> {
    let (buffer, unit, (name, of_values, shape), state, order, spill, of_state, _) = record;
    let tensor = |(name, of_tensor, of_shape): Tensor| {
        // A state tensor with the record's shape is cut into the same chunks as the record's values.
        let grain = u32::from(of_shape == shape);
        Ok::<_, PyErr>(StateTensor { dtype: dtype(py, &of_tensor)?, name, shape: of_shape, grain })
    };
    let state = state.into_iter().map(tensor).collect::<PyResult<_>>()?;
    let mut record = Record {
        name,
        kind: if buffer { Kind::Buffer } else { Kind::Parameter },
        unit,
        dtype: dtype(py, &of_values)?,
        shape,
        order,
        spill: spill.map(|spill| dtype(py, &spill)).transpose()?,
        format: Format::Plain,
        state,
    };
    let Some(of_state) = of_state else { return Ok(record.compact_if_so()) };
    record.format = format(py, &of_state)?;
    if record.format != Format::Plain {
        let wanted = record.state_in(record.format, record.has_momentum()).or_raise(py)?;
        for tensor in &mut record.state {
            let same = wanted.iter().find(|wanted| wanted.name == tensor.name);
            tensor.grain = same.map_or(tensor.grain, |wanted| wanted.grain);
        }
    }
    Ok(record)
}

pub(crate) fn format(py: Python<'_>, name: &str) -> PyResult<Format> {
    Format::from_name(name).ok_or_else(|| config_error(py, format!("{name:?} is not the name of a state format")))
}

/// Returns the state tensors that a record has in the format `of_state`, as (name, dtype, shape). If `momentum` is
/// true, the optimizer has one moment (SGD with momentum, Muon); otherwise it is Adam.
#[pyfunction]
fn store_state_in(
    py: Python<'_>,
    of_values: &str,
    shape: Vec<u64>,
    of_state: &str,
    momentum: bool,
) -> PyResult<Vec<(String, &'static str, Vec<u64>)>> {
    let values = ("values".into(), of_values.into(), shape);
    let record = described_record(py, (false, 0, values, vec![], vec![], None, None, None))?;
    let state = record.state_in(format(py, of_state)?, momentum).or_raise(py)?;
    Ok(state.into_iter().map(|tensor| (tensor.name, tensor.dtype.name(), tensor.shape)).collect())
}

/// The largest size in bytes of the user's value in a commit.
const USER_BYTES_MAX: u32 = 64 << 10;
/// The largest size in bytes of the hyperparameters in a commit. The hyperparameters include the position of a Trainer,
/// which has a limit of its own (`_BYTES_MAX` in `trainer/position.py`).
const HYPERPARAMETERS_BYTES_MAX: u32 = 128 << 10;

pub(crate) fn dtype(py: Python<'_>, name: &str) -> PyResult<Dtype> {
    Dtype::from_name(name).ok_or_else(|| config_error(py, format!("a store cannot hold dtype {name}; use another one")))
}
