//! Builds Python dicts that describe a store: its sizes, its records and its counters.

use memascend_store::{Dtype, Kind, Run, StateTensor, Store};
use pyo3::{
    exceptions::PyIndexError,
    prelude::*,
    types::{PyDict, PyTuple},
};

use crate::errors::OrPyErr as _;

pub(crate) fn of_store<'py>(py: Python<'py>, store: &Store) -> PyResult<Bound<'py, PyDict>> {
    let info = store.info();
    let description = store.description();
    let dict = PyDict::new(py);
    dict.set_item("uuid", format!("{:032x}", u128::from_be_bytes(info.uuid)))?;
    dict.set_item("generation", info.generation)?;
    dict.set_item("step", info.step)?;
    let Run { id, commit, identity, rank, ranks } = info.run;
    let hex = |bytes: [u8; 16], exists: bool| exists.then(|| format!("{:032x}", u128::from_be_bytes(bytes)));
    dict.set_item("run", hex(id, info.run != Run::default()))?;
    dict.set_item("common", commit)?;
    dict.set_item("identity", hex(identity, ranks > 0))?;
    dict.set_item("rank", (ranks > 0).then_some(rank))?;
    dict.set_item("ranks", (ranks > 0).then_some(ranks))?;
    dict.set_item("user", info.user)?;
    dict.set_item("hyperparameters", info.hyperparameters)?;
    dict.set_item("slot_bytes", info.slot_bytes)?;
    dict.set_item("total_bytes", info.total_bytes)?;
    dict.set_item("index_bytes", info.index_bytes)?;
    dict.set_item("spill_index_bytes", info.spill_index_bytes)?;
    dict.set_item("buffer_bytes", info.buffer_bytes)?;
    let log = store.log_state();
    dict.set_item("log_steps", log.steps)?;
    dict.set_item("log_records", log.records)?;
    dict.set_item("log_bytes", log.bytes)?;
    dict.set_item("copy_bytes", store.volume().copy_bytes())?;
    dict.set_item("optimizer", &description.optimizer)?;
    dict.set_item("chunk_elements", description.chunk_elements)?;
    dict.set_item("units", &description.units)?;
    let devices = store.volume().devices();
    dict.set_item("devices", devices.iter().map(|device| device.path.as_os_str()).collect::<Vec<_>>())?;
    Ok(dict)
}

/// Returns a dict of one record's description and counts: name, whether the record is a buffer, unit, dtype, shape,
/// order, spill, step, staged, its state as (name, dtype, shape), and more. No function returns the dicts of all
/// records at once, because each dict takes a kilobyte.
pub(crate) fn of_record<'py>(py: Python<'py>, store: &Store, index: usize) -> PyResult<Bound<'py, PyDict>> {
    let Some(record) = store.description().records.get(index) else {
        return Err(PyIndexError::new_err(format!("the store has no record {index}; pass an index below count()")));
    };
    let state = store.record_state(index).or_raise(py)?;
    let dict = PyDict::new(py);
    dict.set_item("name", &record.name)?;
    dict.set_item("buffer", record.kind == Kind::Buffer)?;
    dict.set_item("unit", record.unit)?;
    dict.set_item("dtype", record.dtype.name())?;
    dict.set_item("shape", &record.shape)?;
    let order = (!record.order.is_empty()).then(|| PyTuple::new(py, &record.order)).transpose()?;
    dict.set_item("order", order)?;
    dict.set_item("spill", record.spill.map(Dtype::name))?;
    dict.set_item("unit_offset", store.layout().in_unit(index, record.unit as usize))?;
    dict.set_item("step", state.step)?;
    dict.set_item("version", state.version)?;
    dict.set_item("staged", state.staged)?;
    dict.set_item("compact", record.is_compact())?;
    dict.set_item("format", record.format.name())?;
    let tensor = |tensor: &StateTensor| (tensor.name.clone(), tensor.dtype.name(), tensor.shape.clone());
    dict.set_item("state", record.state.iter().map(tensor).collect::<Vec<_>>())?;
    Ok(dict)
}

/// Returns the numbers of fetches, of bytes and of seconds of waiting since the store was opened.
pub(crate) fn counters<'py>(py: Python<'py>, store: &Store) -> PyResult<Bound<'py, PyDict>> {
    let counters = store.counters();
    let moved = store.volume().stats();
    let dict = PyDict::new(py);
    dict.set_item("fetches", counters.fetches)?;
    dict.set_item("fetched_bytes", counters.fetched_bytes)?;
    dict.set_item("ram_tier_bytes", counters.ram_tier_bytes)?;
    dict.set_item("wait_seconds", counters.waited.as_secs_f64())?;
    dict.set_item("read_bytes", moved.read.bytes)?;
    dict.set_item("written_bytes", moved.written.bytes)?;
    Ok(dict)
}
