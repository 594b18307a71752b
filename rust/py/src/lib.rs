//! `memascend._core`: the Python bindings of the Rust crates, and nothing else.
//!
//! Each function extracts its arguments, releases the GIL around the work and wraps the result. Only `errors` turns
//! errors into exceptions, and only `arguments` checks numbers.

mod agreement;
mod arguments;
mod checksum;
mod described;
mod dlpack;
mod engine;
mod errors;
mod examination;
mod function;
mod info;
mod kernels;
mod leases;
mod memory;
mod nvme;
mod parts;
mod slow_drop;
mod source;
mod state;
mod store;
mod tensors;
mod waiting;

use pyo3::prelude::*;

/// Registers the classes and functions. Python code imports them only through `memascend.memory` and similar modules.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    checksum::register(module)?;
    described::register(module)?;
    dlpack::register(module)?;
    engine::register(module)?;
    examination::register(module)?;
    function::register(module)?;
    kernels::register(module)?;
    leases::register(module)?;
    memory::register(module)?;
    nvme::register(module)?;
    parts::register(module)?;
    state::register(module)?;
    store::register(module)
}
