//! Tests steps through the engine on simulated devices: the kernels' bits, records in RAM, the log and its replay,
//! spilled gradients, deferred updates, functions on whole records.

mod behind;
mod deferred;
mod exact;
mod lives;
mod replay;
mod setup;
mod spilled;
mod whole;
