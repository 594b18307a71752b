//! SIMD kernels on slices. They check gradients for overflow, sum the squares of gradients, unscale gradients, update
//! parameters by `AdamW`, `Adam` and SGD, and store optimizer state in fewer bits.
//!
//! Each kernel consists of plain loops. The compiler vectorises these loops once for each instruction set ([`Simd`]).
//! [`Simd::chosen`] picks the fastest instruction set at run time, unless `MEMASCEND_SIMD` names one. Every instruction
//! set and every number of threads gives the same bits; only the bits of a NaN may differ. The crate has no thread
//! pool: a call starts its threads and ends them.

#![expect(
    clippy::inline_always,
    reason = "code that is not inlined into a `#[target_feature]` function is compiled for the baseline"
)]
#![expect(clippy::many_single_char_names, reason = "p, g, m and v are the formula's names")]
#![expect(clippy::needless_range_loop, reason = "a loop that indexes several arrays by lane vectorises")]

mod adam;
mod check;
mod compact;
mod doubles;
mod dynamic_map;
mod element;
mod error;
mod exec;
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
mod widen;

pub use adam::{ADAM_ARITHMETIC, AdamState, adam};
pub use check::{Check, check, check_and_unscale};
pub use compact::{CompactState, adam_compact};
pub use doubles::{add_doubles, check_doubles};
pub use element::{Bf16, Element, F16, Floats, FloatsMut};
pub use error::{Error, Result};
pub use exec::{Exec, THREAD_ELEMENTS_MIN};
pub use inplace::{add, scale};
pub use moments::{Codes, Moments};
pub use philox::Random;
pub use reduced::{Position, REDUCED_ARITHMETIC, Reduced, WideState, decode, encode, update};
pub use rule::{Momentum, Rule};
pub use scalars::{Hyperparameters, Scalars};
pub use simd::Simd;
pub use squares::Squares;
pub use stream::STREAM_ELEMENTS_MIN;
pub use weights::Weights;
pub use widen::widen;
