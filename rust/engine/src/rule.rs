//! Says in a log what a gradient is applied with, and takes it from there.

use memascend_math::{ADAM_ARITHMETIC, Hyperparameters, Scalars};
use memascend_store::Rule;

use crate::{Error, Result};

const ADAM: &str = "adam";

/// What a gradient is applied with whose update has these hyperparameters, after it was multiplied by each factor in turn.
pub fn adam_rule(hyperparameters: &Hyperparameters, factors: &[f32]) -> Result<Rule> {
    let scalars = hyperparameters.scalars()?;
    let numbers = numbers(&scalars).into_iter().map(|(name, number)| (name.into(), u64::from(number))).collect();
    let factors = factors.iter().map(|factor| factor.to_bits()).collect();
    Ok(Rule { name: ADAM.into(), arithmetic: ADAM_ARITHMETIC, numbers, factors })
}

fn numbers(scalars: &Scalars) -> [(&'static str, u32); 10] {
    [
        ("grad_factor", scalars.grad_factor.to_bits()),
        ("decay", scalars.decay.to_bits()),
        ("l2", scalars.l2.to_bits()),
        ("first_weight", scalars.first_weight.to_bits()),
        ("from_gradient", u32::from(scalars.from_gradient)),
        ("beta2", scalars.beta2.to_bits()),
        ("one_minus_beta2", scalars.one_minus_beta2.to_bits()),
        ("bias2_root", scalars.bias2_root.to_bits()),
        ("eps", scalars.eps.to_bits()),
        ("step_size", scalars.step_size.to_bits()),
    ]
}

/// The scalars and factors of a rule; an error where it is none that is known here.
pub(crate) fn taken(rule: &Rule) -> Result<(Scalars, Vec<f32>)> {
    let Rule { name, arithmetic, .. } = rule;
    if (name.as_str(), *arithmetic) != (ADAM, ADAM_ARITHMETIC) {
        return Err(Error::Invalid(format!(
            "the store's log has gradients for {name:?} with arithmetic {arithmetic}, which this version of memascend does \
             not know: open the store with the version that wrote it, and close it there"
        )));
    }
    let number = |name: &str| {
        let found = rule.numbers.iter().find(|(known, _)| known == name);
        let bits = found.and_then(|&(_, bits)| u32::try_from(bits).ok());
        bits.ok_or_else(|| Error::Invalid(format!("the store's log says nothing of {name:?} for {ADAM:?}")))
    };
    let float = |name: &str| number(name).map(f32::from_bits);
    let scalars = Scalars {
        grad_factor: float("grad_factor")?,
        decay: float("decay")?,
        l2: float("l2")?,
        first_weight: float("first_weight")?,
        from_gradient: number("from_gradient")? != 0,
        beta2: float("beta2")?,
        one_minus_beta2: float("one_minus_beta2")?,
        bias2_root: float("bias2_root")?,
        eps: float("eps")?,
        step_size: float("step_size")?,
    };
    Ok((scalars, rule.factors.iter().map(|&bits| f32::from_bits(bits)).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hyperparameters() -> Hyperparameters {
        Hyperparameters {
            lr: 1e-3,
            beta1: 0.4,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            decoupled: true,
            step: 3,
            grad_scale: 0.5,
            maximize: true,
            seed: 0,
        }
    }

    #[test]
    fn what_was_said_is_taken() -> Result<()> {
        let rule = adam_rule(&hyperparameters(), &[0.5, -3.0])?;
        assert_eq!(taken(&rule)?, (hyperparameters().scalars()?, vec![0.5, -3.0]));
        Ok(())
    }

    #[test]
    fn what_is_not_known_is_refused_by_its_name() -> Result<()> {
        let rule = adam_rule(&hyperparameters(), &[])?;
        let other = Rule { arithmetic: 2, ..rule.clone() };
        assert!(taken(&other).is_err_and(|error| error.to_string().contains("\"adam\" with arithmetic 2")));
        let other = Rule { numbers: rule.numbers[1..].to_vec(), ..rule };
        assert!(taken(&other).is_err_and(|error| error.to_string().contains("nothing of \"grad_factor\"")));
        Ok(())
    }
}
