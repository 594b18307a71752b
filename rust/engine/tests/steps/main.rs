//! Tests steps through the engine on simulated devices: bit-exact updates, records in RAM, the gradient log and its
//! replay, spilled gradients, deferred updates, and functions on whole records.

mod behind;
mod deferred;
mod exact;
mod lives;
mod replay;
mod setup;
mod spilled;
mod whole;
