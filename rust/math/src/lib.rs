//! SIMD kernels on slices: overflow check with norm and unscaling, `AdamW` and `Adam`, casts.
//!
//! Each algorithm is written once, as a loop that the compiler vectorises, and compiled for each instruction set
//! ([`Simd`]); the best one that the processor has is chosen at run time. Every instruction set and every number of
//! threads gives the same bits. There is no pool: a call starts the threads it is told to use and ends them.

#![expect(
    clippy::inline_always,
    reason = "what is not inlined into a `#[target_feature]` function is compiled for the baseline"
)]
#![expect(clippy::many_single_char_names, reason = "p, g, m and v are the formula's names")]
#![expect(clippy::needless_range_loop, reason = "lanes index several arrays alike, which is what vectorises")]

mod accumulate;
mod adam;
mod cast;
mod check;
mod compact;
mod doubles;
mod dynamic_map;
mod element;
mod error;
mod exec;
mod fused;
mod inplace;
mod mode;
mod moments;
mod narrow;
mod philox;
mod quantize;
mod reduced;
mod rule;
mod scalars;
mod simd;
mod squares;
mod stochastic;
mod stream;
mod weights;

pub use accumulate::accumulate;
pub use adam::{ADAM_ARITHMETIC, State, adam};
pub use cast::cast;
pub use check::{Check, check, check_and_unscale, has_nonfinite};
pub use compact::{CompactState, adam_compact, join_master, split_master};
pub use doubles::{add_doubles, check_doubles};
pub use element::{Bf16, Element, F16, Floats, FloatsMut};
pub use error::{Error, Result};
pub use exec::{Exec, THREAD_ELEMENTS_MIN};
pub use inplace::{add, scale};
pub use moments::{Codes, Moments};
pub use philox::Random;
pub use reduced::{Place, REDUCED_ARITHMETIC, Reduced, WideState, decode, encode, update};
pub use rule::{Momentum, Rule};
pub use scalars::{Hyperparameters, Scalars};
pub use simd::Simd;
pub use squares::Squares;
pub use stream::STREAM_ELEMENTS_MIN;
pub use weights::Weights;
