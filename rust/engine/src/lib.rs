//! The pipelined update: reads a chunk of state, computes, writes it to the slot that is not live.
//!
//! An [`Engine`] owns a few staging chunks and one thread. [`Engine::update`] hands it a parameter's gradient and returns
//! at once, unless so many bytes of gradients wait already that it has to be slower. [`Engine::finish`] waits until all
//! is staged; [`Engine::commit`] makes the step live, [`Engine::discard`] forgets it.

#![expect(clippy::cast_possible_truncation, reason = "sizes of 64 bits are those of memory, whose usize has as many")]

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

pub use apply::{Application, Chunk, Function, Given, other_bytes};
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
pub use update::By;
pub use workbench::chunk_bytes;
