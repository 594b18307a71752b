//! Updates the training state of a store in a pipeline. The pipeline reads a chunk of state, computes the update, and
//! writes the updated chunk to the slot that the last commit does not use.
//!
//! An [`Engine`] owns the pipeline's thread and a few staging chunks, the buffers through which the state passes.
//! [`Engine::update`] queues the update of one parameter and returns at once. It waits only if the queue has no room
//! for the gradient ([`Options::queue_bytes_max`]). [`Engine::finish`] waits until every queued update is staged.
//! [`Engine::commit`] makes the staged step the valid state of the store, and [`Engine::discard`] drops the staged
//! step.

#![expect(clippy::cast_possible_truncation, reason = "usize has 64 bits here, so a 64-bit size fits into it")]

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
