//! Describes one step of Adam or SGD, and computes SGD and the Adam of `bitsandbytes` on one element.

use crate::{Error, Hyperparameters, Result, Scalars};

/// The hyperparameters of one step of SGD, with or without momentum. On fp32 state, the update gives the same bits as
/// torch's `SGD`.
#[derive(Debug, Clone, Copy)]
pub struct Momentum {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Factor of the former momentum. If this factor is 0, the step uses no momentum, and a stored momentum stays
    /// unchanged.
    pub momentum: f64,
    /// Each update but the first adds the gradient to the momentum with the factor `1 - dampening`.
    pub dampening: f64,
    /// Weight decay, at least 0. The step adds the parameter times this factor to the gradient.
    pub weight_decay: f64,
    /// If true, the step adds `momentum` times the updated momentum to the gradient, and uses the sum as the
    /// direction.
    pub nesterov: bool,
    /// The number of this update, from 1. The first update sets the momentum to the gradient.
    pub step: u64,
    /// Factor of the gradient.
    pub grad_scale: f64,
    /// If true, the step increases the loss instead of decreasing it.
    pub maximize: bool,
    /// Seed of stochastic rounding.
    pub seed: u64,
}

/// An optimizer and its hyperparameters at one step.
#[derive(Debug, Clone, Copy)]
pub enum Rule {
    /// `AdamW` or `Adam`.
    Adam(Hyperparameters),
    /// SGD, with or without momentum.
    Momentum(Momentum),
}

impl From<Hyperparameters> for Rule {
    fn from(numbers: Hyperparameters) -> Self {
        Self::Adam(numbers)
    }
}

impl From<&Hyperparameters> for Rule {
    fn from(numbers: &Hyperparameters) -> Self {
        Self::Adam(*numbers)
    }
}

impl From<Momentum> for Rule {
    fn from(numbers: Momentum) -> Self {
        Self::Momentum(numbers)
    }
}

/// A [`Rule`]'s numbers in fp32, as the arithmetic on elements uses them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Formula {
    Adam { scalars: Scalars, beta1: f32, one_minus_beta1: f32 },
    Momentum(MomentumScalars),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct MomentumScalars {
    grad_factor: f32,
    weight_decay: f32,
    momentum: f32,
    pub(crate) has_momentum: bool,
    one_minus_dampening: f32,
    minus_lr: f32,
    nesterov: bool,
    is_first: bool,
}

impl Rule {
    /// The number of this update, from 1.
    #[must_use]
    pub fn step(&self) -> u64 {
        match self {
            Self::Adam(numbers) => numbers.step,
            Self::Momentum(numbers) => numbers.step,
        }
    }

    /// Seed of stochastic rounding.
    #[must_use]
    pub fn seed(&self) -> u64 {
        match self {
            Self::Adam(numbers) => numbers.seed,
            Self::Momentum(numbers) => numbers.seed,
        }
    }

    /// Fails if a number is outside the range for which the formula is defined.
    pub fn check(&self) -> Result<()> {
        self.formula().map(drop)
    }

    #[expect(clippy::cast_possible_truncation, reason = "rounding to fp32 is the purpose")]
    pub(crate) fn formula(&self) -> Result<Formula> {
        Ok(match self {
            Self::Adam(numbers) => Formula::Adam {
                scalars: numbers.scalars()?,
                beta1: numbers.beta1 as f32,
                one_minus_beta1: (1.0 - numbers.beta1) as f32,
            },
            Self::Momentum(numbers) => Formula::Momentum(numbers.scalars()?),
        })
    }
}

impl Momentum {
    #[expect(clippy::cast_possible_truncation, reason = "rounding to fp32 is the purpose")]
    fn scalars(&self) -> Result<MomentumScalars> {
        let max = f64::from(f32::MAX);
        let number = |name, value, wanted| Err(Error::Number { name, value, wanted });
        for (name, value) in [("lr", self.lr), ("momentum", self.momentum), ("weight_decay", self.weight_decay)] {
            if !(0.0..=max).contains(&value) {
                return number(name, value, "a number that is finite in fp32 and not negative");
            }
        }
        if self.dampening.is_nan() || self.dampening.abs() > max {
            return number("dampening", self.dampening, "a number that is finite in fp32");
        }
        // NaN is allowed: clipping by a NaN norm gives a NaN factor, which makes all updated values NaN, as in torch.
        if self.grad_scale.abs() > max {
            return number("grad_scale", self.grad_scale, "a number that is finite in fp32, or NaN");
        }
        if self.nesterov && self.momentum == 0.0 {
            return number("momentum", 0.0, "a number above 0, because nesterov is true");
        }
        if self.nesterov && self.dampening != 0.0 {
            return number("dampening", self.dampening, "0, because nesterov is true");
        }
        if self.step == 0 {
            return number("step", 0.0, "the number of this update, counted from 1");
        }
        Ok(MomentumScalars {
            grad_factor: if self.maximize { -self.grad_scale } else { self.grad_scale } as f32,
            weight_decay: self.weight_decay as f32,
            momentum: self.momentum as f32,
            has_momentum: self.momentum != 0.0,
            one_minus_dampening: (1.0 - self.dampening) as f32,
            minus_lr: -self.lr as f32,
            nesterov: self.nesterov,
            is_first: self.step == 1,
        })
    }
}

/// Updates one element by Adam as `bitsandbytes` does: decays the first moment, then adds the gradient to it.
#[inline(always)]
pub(crate) fn decaying_adam(
    (p, g, m, v): (f32, f32, f32, f32),
    s: &Scalars,
    (beta1, one_minus_beta1): (f32, f32),
    l2: bool,
) -> (f32, f32, f32) {
    let p = p * s.decay;
    let g = g * s.grad_factor;
    // Without L2 decay, skips the addition: an infinite parameter times zero would be a NaN.
    let g = if l2 { p.mul_add(s.l2, g) } else { g };
    let m = g.mul_add(one_minus_beta1, m * beta1);
    let v = (g * s.one_minus_beta2).mul_add(g, v * s.beta2);
    let denominator = v.sqrt() / s.bias2_root + s.eps;
    (p + (m * s.step_size) / denominator, m, v)
}

/// Updates one element by SGD, with or without momentum.
#[inline(always)]
pub(crate) fn momentum(p: f32, g: f32, m: f32, s: &MomentumScalars) -> (f32, f32) {
    let g = g * s.grad_factor;
    // Without weight decay, skips the addition: an infinite parameter times zero would be a NaN.
    let g = if s.weight_decay == 0.0 { g } else { p.mul_add(s.weight_decay, g) };
    if !s.has_momentum {
        return (g.mul_add(s.minus_lr, p), m);
    }
    let m = if s.is_first { g } else { g.mul_add(s.one_minus_dampening, m * s.momentum) };
    let direction = if s.nesterov { m.mul_add(s.momentum, g) } else { m };
    (direction.mul_add(s.minus_lr, p), m)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::{Exec, Floats, Moments, Position, Reduced, Weights, update};

    fn sgd(momentum: f64) -> Rule {
        let numbers = Momentum {
            lr: 0.5,
            momentum,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            step: 2,
            grad_scale: 1.0,
            maximize: false,
            seed: 0,
        };
        numbers.into()
    }

    #[test]
    fn sgd_without_momentum_leaves_the_stored_moment_unchanged() -> Result<()> {
        let exec = Exec::new(NonZeroUsize::MIN)?;
        for (rule, values, kept) in [(sgd(0.0), 0.0_f32, 4.0_f32), (sgd(0.5), -1.0, 4.0)] {
            let (mut p, mut m) = ([1.0_f32; 3], [4.0_f32; 3]);
            let state = Reduced { weights: Weights::Single(&mut p), moments: Moments::Single(&mut m, None) };
            update(state, Floats::F32(&[2.0; 3]), &rule, Position::default(), exec)?;
            assert_eq!(format!("{p:?} {m:?}"), format!("{:?} {:?}", [values; 3], [kept; 3]), "{rule:?}");
        }
        let mut p = [1.0_f32; 3];
        let state = Reduced { weights: Weights::Single(&mut p), moments: Moments::Nothing };
        assert!(update(state, Floats::F32(&[2.0; 3]), &sgd(0.5), Position::default(), exec).is_err());
        let state = Reduced { weights: Weights::Single(&mut p), moments: Moments::Nothing };
        update(state, Floats::F32(&[2.0; 3]), &sgd(0.0), Position::default(), exec)?;
        assert_eq!(p.map(f32::to_bits), [0; 3]);
        Ok(())
    }
}
