//! Tests steps through the engine on simulated devices: held entries, the log and its replay, spilled gradients, whole entries.

mod held;
mod joined;
mod replay;
mod setup;
mod spilled;
mod whole;
