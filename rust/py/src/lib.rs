//! `memascend._core`: the Python bindings of the Rust crates, and nothing else.
//!
//! A function extracts its arguments, releases the GIL for waits and long computations, and wraps the result. Only
//! `errors` converts errors of the other crates into exceptions.

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

/// Registers the classes and functions. In the package, only `memory`, `nvme`, `tensors`, `storage` and `kernels`
/// import this module.
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
