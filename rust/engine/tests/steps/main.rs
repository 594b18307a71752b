//! Tests steps through the engine on simulated devices: kernels' bits, held entries, the log and its replay, spilled
//! gradients, whole entries.

mod exact;
mod lives;
mod replay;
mod setup;
mod spilled;
mod whole;
