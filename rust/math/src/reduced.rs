//! Computes one step of an optimizer on reduced state: moments of 16 or 8 bits, a compact master, or no master.
//!
//! Except in `narrow.rs`, each block of 256 elements is widened to fp32 on the stack, updated there, and rounded back.
//! Stochastic rounding draws random bits by the element's index in the whole parameter, and a block of 8-bit codes has
//! 256 elements too. So every shard that begins at the start of a block can be updated independently.

use crate::{
    Error, Exec, Floats, Moments, Random, Result, Rule, Scalars, Weights,
    adam::one,
    element::for_type,
    exec::Work,
    narrow::Narrow,
    philox::{BLOCK, Purpose},
    rule::{Formula, decaying_adam, momentum},
    simd::{Kernel, Simd},
    weights::{Block, widened},
};

/// The version of this arithmetic. Calls with the same version, state, gradient, rule and position give the same bits.
pub const REDUCED_ARITHMETIC: u32 = 1;

/// `Exec::run` splits work at multiples of this many elements. For every type, this many elements fill whole blocks and
/// whole cache lines.
const GRAIN: usize = 1024;

/// The state of a parameter or of a shard, updated in place.
#[derive(Debug)]
pub struct Reduced<'a> {
    /// The parameter, with its master if it has one.
    pub weights: Weights<'a>,
    /// The parameter's moments.
    pub moments: Moments<'a>,
}

/// Identifies the update and the first element of a call. Stochastic rounding draws its random bits from both.
#[derive(Debug, Clone, Copy, Default)]
pub struct Position {
    /// The source of the random bits.
    pub random: Random,
    /// Index of the first element in the whole parameter. With 8-bit moments the index must be a multiple of 256, the
    /// number of elements in a block.
    pub first: u64,
}

/// State in fp32. Each part is optional: [`encode`] reads the given parts, and [`decode`] fills them.
#[derive(Debug)]
pub struct WideState<T> {
    /// The parameter.
    pub master: Option<T>,
    /// The first moment, or the momentum.
    pub first: Option<T>,
    /// The second moment, if the optimizer has one.
    pub second: Option<T>,
}

impl<T> Default for WideState<T> {
    fn default() -> Self {
        Self { master: None, first: None, second: None }
    }
}

impl<T> WideState<T> {
    fn parts(&self) -> impl Iterator<Item = &T> {
        self.master.iter().chain(&self.first).chain(&self.second)
    }

    fn split_at(self, split: impl Fn(T) -> (T, T)) -> (Self, Self) {
        let (master, master_after) = self.master.map(&split).unzip();
        let (first, first_after) = self.first.map(&split).unzip();
        let (second, second_after) = self.second.map(&split).unzip();
        (Self { master, first, second }, Self { master: master_after, first: first_after, second: second_after })
    }
}

/// Updates `state` with `grad`.
pub fn update(state: Reduced<'_>, grad: Floats<'_>, rule: &Rule, position: Position, exec: Exec) -> Result<()> {
    state.agree()?;
    let formula = rule.formula()?;
    let (name, has_second) = match formula {
        Formula::Adam { .. } => ("Adam", true),
        Formula::Momentum(_) => ("SGD", false),
    };
    let lacks =
        matches!((&formula, &state.moments), (Formula::Momentum(numbers), Moments::Nothing) if numbers.has_momentum);
    if lacks || has_second != state.moments.has_second() {
        let wanted = if has_second { "two moments" } else { "one moment, or no moment if its momentum is 0" };
        return Err(Error::Moments { rule: name, wanted });
    }
    if grad.len() != state.weights.len() {
        let (len, other_len) = (grad.len(), state.weights.len());
        return Err(Error::Length { name: "grad", len, other: "the parameter", other_len });
    }
    if matches!(state.moments, Moments::Blocks(..)) && !position.first.is_multiple_of(BLOCK as u64) {
        return Err(Error::First { first: position.first });
    }
    exec.run(ReducedKernel { state, grad, formula, position }, GRAIN, Simd::run);
    Ok(())
}

/// Writes the given parts of `wide` into `state`. Rounds to nearest, even if updates round this state stochastically.
/// Parts that are not given stay unchanged, with one exception: if one of two 8-bit moments is given, the other moment
/// is decoded and encoded again, which may change its codes.
pub fn encode(wide: WideState<&[f32]>, state: Reduced<'_>, exec: Exec) -> Result<()> {
    wide_agrees(&state, wide.parts().copied().map(<[f32]>::len), wide.second.is_some())?;
    exec.run(Encode { wide, state }, GRAIN, Simd::run);
    Ok(())
}

/// Decodes `state` to fp32, and writes the parts for which `wide` has slices. Borrows `state` mutably, but does not
/// change it.
pub fn decode(state: Reduced<'_>, wide: WideState<&mut [f32]>, exec: Exec) -> Result<()> {
    wide_agrees(&state, wide.parts().map(|part| part.len()), wide.second.is_some())?;
    exec.run(Decode { state, wide }, GRAIN, Simd::run);
    Ok(())
}

/// Fails if `state` is inconsistent, if a wide second moment is given but `state` has none, or if one of `lengths`, the
/// lengths of the given parts, is not the parameter's length.
fn wide_agrees(state: &Reduced<'_>, mut lengths: impl Iterator<Item = usize>, has_second: bool) -> Result<()> {
    state.agree()?;
    let other_len = state.weights.len();
    if has_second && !state.moments.has_second() {
        return Err(Error::Moments { rule: "a wide second moment", wanted: "two moments" });
    }
    match lengths.find(|&len| len != other_len) {
        None => Ok(()),
        Some(len) => Err(Error::Length { name: "a wide tensor", len, other: "the parameter", other_len }),
    }
}

impl Reduced<'_> {
    /// Fails unless the weights are consistent, the moments have lengths that match, and a compact parameter has
    /// exactly one place for its rounding bits.
    fn agree(&self) -> Result<()> {
        self.weights.agree()?;
        self.moments.agree(self.weights.len())?;
        let compact = matches!(self.weights, Weights::Compact { .. });
        if compact && self.weights.needs_signs() != self.moments.has_signs() {
            return Err(Error::Signs);
        }
        Ok(())
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (weights, weights_after) = self.weights.split_at(middle);
        let (moments, moments_after) = self.moments.split_at(middle);
        (Self { weights, moments }, Self { weights: weights_after, moments: moments_after })
    }

    #[inline(always)]
    fn load(&self, at: usize, len: usize, blocks: &mut Blocks) {
        self.moments.load(at, len, &mut blocks.first, &mut blocks.second);
        self.weights.load(at, len, &mut blocks.second, &mut blocks.master);
    }

    #[inline(always)]
    fn store(&mut self, at: usize, len: usize, blocks: &mut Blocks, drawn: (Option<Random>, u64)) {
        self.weights.store(at, len, &mut blocks.second, &blocks.master, drawn);
        self.moments.store(at, len, &blocks.first, &blocks.second, drawn);
    }
}

/// The buffers of one block.
struct Blocks {
    master: Block,
    grad: Block,
    first: Block,
    second: Block,
}

impl Blocks {
    const ZEROS: Self = Self { master: [0.0; BLOCK], grad: [0.0; BLOCK], first: [0.0; BLOCK], second: [0.0; BLOCK] };
}

struct ReducedKernel<'a> {
    state: Reduced<'a>,
    grad: Floats<'a>,
    formula: Formula,
    position: Position,
}

impl Work for ReducedKernel<'_> {
    fn len(&self) -> usize {
        self.grad.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (state, state_after) = self.state.split_at(middle);
        let (grad, grad_after) = self.grad.split_at(middle);
        let position = Position { first: self.position.first + middle as u64, ..self.position };
        (Self { state, grad, ..self }, Self { state: state_after, grad: grad_after, position, ..self })
    }
}

impl Kernel for ReducedKernel<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let len = self.len();
        let decays = self.state.moments.decays();
        let mut blocks = Blocks::ZEROS;
        let mut at = 0;
        while at < len {
            // `block` is called in two places, so that the compiler knows the length in the first call.
            if len - at >= BLOCK {
                self.block(at, BLOCK, decays, &mut blocks);
            } else {
                self.block(at, len - at, decays, &mut blocks);
            }
            at += BLOCK;
        }
    }
}

impl ReducedKernel<'_> {
    #[inline(always)]
    fn block(&mut self, at: usize, len: usize, decays: bool, blocks: &mut Blocks) {
        let from = self.position.first + at as u64;
        let (random, (_, grad)) = (self.position.random, self.grad.split_at(at));
        if let Some((narrow, scalars)) = self.narrow(at, len) {
            let drawn = random.elements(from, Purpose::SecondMoment);
            return narrow.update(grad, &drawn, &scalars);
        }
        self.state.load(at, len, blocks);
        for_type!(Floats, self.grad, grad => widened(&grad[at..][..len], &mut blocks.grad));
        let Blocks { master, grad, first, second } = blocks;
        match self.formula {
            Formula::Adam { scalars, beta1, one_minus_beta1 } if decays => {
                let (weights, l2) = ((beta1, one_minus_beta1), scalars.l2 != 0.0);
                for i in 0..BLOCK {
                    let element = (master[i], grad[i], first[i], second[i]);
                    (master[i], first[i], second[i]) = decaying_adam(element, &scalars, weights, l2);
                }
            }
            Formula::Adam { scalars, .. } => {
                let l2 = scalars.l2 != 0.0;
                for i in 0..BLOCK {
                    (master[i], first[i], second[i]) = one(master[i], grad[i], first[i], second[i], &scalars, l2);
                }
            }
            Formula::Momentum(scalars) => {
                for i in 0..BLOCK {
                    (master[i], first[i]) = momentum(master[i], grad[i], first[i], &scalars);
                }
            }
        }
        self.state.store(at, len, blocks, (Some(self.position.random), from));
    }
}

impl ReducedKernel<'_> {
    /// Returns the kernel of `narrow.rs` for this block, and its scalars. Returns `None` if `Narrow` does not support
    /// this state or this optimizer.
    #[inline(always)]
    fn narrow(&mut self, at: usize, len: usize) -> Option<(Narrow<'_>, Scalars)> {
        let Weights::Compact { values, rest, rounded_up: None } = &mut self.state.weights else { return None };
        let Moments::Bf16(first, Some(second)) = &mut self.state.moments else { return None };
        let Formula::Adam { scalars, .. } = self.formula else { return None };
        let (values, rest) = (&mut values[at..][..len], &mut rest[at..][..len]);
        let (first, second) = (&mut first[at..][..len], &mut second[at..][..len]);
        Some((Narrow { values, rest, first, second }, scalars))
    }
}

struct Encode<'a> {
    wide: WideState<&'a [f32]>,
    state: Reduced<'a>,
}

impl Work for Encode<'_> {
    fn len(&self) -> usize {
        self.state.weights.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (wide, wide_after) = self.wide.split_at(|part| part.split_at(middle));
        let (state, state_after) = self.state.split_at(middle);
        (Self { wide, state }, Self { wide: wide_after, state: state_after })
    }
}

impl Kernel for Encode<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let mut blocks = Blocks::ZEROS;
        let signs = self.state.weights.needs_signs();
        // Re-encoding may change 8-bit codes. So if no moment is given, the moments are stored only if the signs of the
        // second moment store rounding bits. Such moments do not have 8 bits.
        let weights = signs || self.wide.master.is_some();
        let moments = signs || self.wide.first.is_some() || self.wide.second.is_some();
        for at in (0..self.len()).step_by(BLOCK) {
            let len = BLOCK.min(self.len() - at);
            self.state.load(at, len, &mut blocks);
            let Blocks { master, first, second, .. } = &mut blocks;
            for (given, block) in
                [(self.wide.master, &mut *master), (self.wide.first, &mut *first), (self.wide.second, &mut *second)]
            {
                if let Some(given) = given {
                    widened(&given[at..][..len], block);
                }
            }
            if weights {
                self.state.weights.store(at, len, second, master, (None, 0));
            }
            if moments {
                self.state.moments.store(at, len, first, second, (None, 0));
            }
        }
    }
}

struct Decode<'a> {
    state: Reduced<'a>,
    wide: WideState<&'a mut [f32]>,
}

impl Work for Decode<'_> {
    fn len(&self) -> usize {
        self.state.weights.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (wide, wide_after) = self.wide.split_at(|part| part.split_at_mut(middle));
        let (state, state_after) = self.state.split_at(middle);
        (Self { state, wide }, Self { state: state_after, wide: wide_after })
    }
}

impl Kernel for Decode<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let mut blocks = Blocks::ZEROS;
        for at in (0..self.len()).step_by(BLOCK) {
            let len = BLOCK.min(self.len() - at);
            self.state.load(at, len, &mut blocks);
            let parts = [
                (&mut self.wide.master, &blocks.master),
                (&mut self.wide.first, &blocks.first),
                (&mut self.wide.second, &blocks.second),
            ];
            for (part, block) in parts {
                if let Some(part) = part {
                    part[at..][..len].copy_from_slice(&block[..len]);
                }
            }
        }
    }
}
