//! Tests steps through the engine on simulated devices: kernels' bits, records in RAM, the log and its replay, spilled
//! gradients, updates that are left to the next step, whole records.

mod behind;
mod deferred;
mod exact;
mod lives;
mod replay;
mod setup;
mod spilled;
mod whole;
