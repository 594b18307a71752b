//! Updates the training state of a store in a pipeline: reads a chunk of state, computes, and writes it to the slot
//! that is not live.
//!
//! An [`Engine`] owns a few staging chunks and one thread. [`Engine::update`] queues a parameter's gradient and returns
//! at once; it waits only while the queue already holds [`Options::queue_bytes_max`] bytes of gradients.
//! [`Engine::finish`] waits until every update is staged; [`Engine::commit`] makes the step live, [`Engine::discard`]
//! drops it.

#![expect(clippy::cast_possible_truncation, reason = "64-bit sizes are sizes in memory, and usize has 64 bits here")]

mod apply;
mod caller;
mod compact;
mod counters;
mod deferred;
mod engine;
mod error;
mod fill;
mod gradient;
mod job;
mod live;
mod log_record;
mod logged;
mod pipeline;
mod queue;
mod ram_tier;
mod ram_tier_updates;
mod reduced;
mod replay;
mod rule;
mod spill;
mod step;
mod turn;
mod unit_fetch;
mod update;
mod whole;
mod workbench;

pub use apply::{Application, Chunk, Function, FunctionInput, other_bytes};
pub use counters::Counters;
pub use engine::{Engine, Options};
pub use error::{Cause, Error, Result};
pub use fill::First;
pub use gradient::{Gradient, Source, Window};
pub use logged::apply_logs;
pub use memascend_math::{Check, Hyperparameters, Momentum, Rule, WideState};
pub use pipeline::CHUNKS_DEFAULT;
pub use reduced::Form;
pub use rule::rule_of;
pub use unit_fetch::{UnitFetch, UnitParts};
pub use update::GradientSource;
pub use workbench::chunk_bytes;
