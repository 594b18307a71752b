//! Computes the scalars of an Adam step in f64, rounded once to fp32, as torch's fused kernel does.

use crate::{Error, Result};

/// The hyperparameters of one step of `AdamW` or `Adam`.
#[derive(Debug, Clone, Copy)]
pub struct Hyperparameters {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Decay of the first moment, in [0, 1).
    pub beta1: f64,
    /// Decay of the second moment, in [0, 1).
    pub beta2: f64,
    /// The number that is added to the denominator; at least 0.
    pub eps: f64,
    /// Weight decay, at least 0.
    pub weight_decay: f64,
    /// If true, the step multiplies the parameter by `1 - lr * weight_decay` (`AdamW`). If false, the step adds the
    /// parameter times `weight_decay` to the gradient (`Adam`, L2).
    pub decoupled: bool,
    /// The number of this update, from 1.
    pub step: u64,
    /// Factor of the gradient.
    pub grad_scale: f64,
    /// If true, the step increases the loss instead of decreasing it.
    pub maximize: bool,
    /// Seed of stochastic rounding.
    pub seed: u64,
}

/// The scalars of a step, the same for every element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scalars {
    /// Factor of the gradient; negative if the loss is maximised.
    pub grad_factor: f32,
    /// Factor of the parameter, `1 - lr * weight_decay`; 1 with L2 decay.
    pub decay: f32,
    /// The step adds the parameter times this factor to the gradient; 0 with decoupled decay.
    pub l2: f32,
    /// The weight of `g - m` in the first moment: `w = 1 - beta1`. With `from_gradient`, the weight is `w - 1` instead.
    pub first_weight: f32,
    /// If true, the first moment is computed from `g` instead of `m`: torch interpolates from the nearer end.
    pub from_gradient: bool,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Weight of the squared gradient in the second moment.
    pub one_minus_beta2: f32,
    /// The square root of the second bias correction.
    pub bias2_root: f32,
    /// The number that is added to the denominator.
    pub eps: f32,
    /// Minus the learning rate divided by the first bias correction.
    pub step_size: f32,
}

impl Hyperparameters {
    /// Computes the scalars of this step.
    ///
    /// # Errors
    /// If a number is outside the range for which the formula is defined.
    #[expect(clippy::cast_possible_truncation, reason = "rounding to fp32 is the purpose")]
    pub fn scalars(&self) -> Result<Scalars> {
        self.checked()?;
        let weight = (1.0 - self.beta1) as f32;
        let from_gradient = weight >= 0.5;
        #[expect(clippy::cast_precision_loss, reason = "no run takes 2^53 steps")]
        let step = self.step as f64;
        let bias1 = 1.0 - self.beta1.powf(step);
        let bias2 = 1.0 - self.beta2.powf(step);
        let factor = if self.maximize { -self.grad_scale } else { self.grad_scale };
        Ok(Scalars {
            grad_factor: factor as f32,
            decay: if self.decoupled { (1.0 - self.lr * self.weight_decay) as f32 } else { 1.0 },
            l2: if self.decoupled { 0.0 } else { self.weight_decay as f32 },
            first_weight: if from_gradient { weight - 1.0 } else { weight },
            from_gradient,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            bias2_root: bias2.sqrt() as f32,
            eps: self.eps as f32,
            step_size: -(self.lr / bias1) as f32,
        })
    }

    fn checked(&self) -> Result<()> {
        let max = f64::from(f32::MAX);
        let not_negative = |value: f64| (0.0..=max).contains(&value);
        let below_one = |value: f64| (0.0..1.0).contains(&value);
        let number = |name, value, wanted| Err(Error::Number { name, value, wanted });
        for (name, value) in [("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)] {
            if !not_negative(value) {
                return number(name, value, "a number that is finite in fp32 and not negative");
            }
        }
        for (name, value) in [("betas[0]", self.beta1), ("betas[1]", self.beta2)] {
            if !below_one(value) {
                return number(name, value, "a number from 0 up to, and not including, 1");
            }
        }
        // NaN is allowed: clipping by a NaN norm gives a NaN factor, which makes all gradients NaN, as in torch.
        if self.grad_scale.abs() > max {
            return number("grad_scale", self.grad_scale, "a number that is finite in fp32, or NaN");
        }
        if self.step == 0 {
            return number("step", 0.0, "the number of this update, counted from 1");
        }
        Ok(())
    }
}
