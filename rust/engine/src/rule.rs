//! Encodes and decodes the rule of a logged gradient: the kernel, the hyperparameters, and the factors of the gradient.

use memascend_math::{ADAM_ARITHMETIC, Hyperparameters, Momentum, REDUCED_ARITHMETIC, Rule, Scalars};
use memascend_store::{LoggedRule, Record};

use crate::{Error, Result, reduced::is_reduced};

/// The name of the rule for Adam on float32 moments. With this rule, the log stores the scalars that the kernel
/// computes with.
const ADAM: &str = "adam";
/// The name of the rule for SGD on float32 state, with or without momentum. With this rule, the log stores the
/// hyperparameters.
const MOMENTUM: &str = "momentum";
/// The names of the rules for Adam, and for SGD with momentum, on state in a reduced format. With these two rules, the
/// log stores the hyperparameters.
const REDUCED_ADAM: &str = "adam in a format";
const REDUCED_MOMENTUM: &str = "momentum in a format";

/// A decoded rule of the log: how to apply a gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Taken {
    Single(Scalars),
    Reduced(Rule),
    Momentum(Momentum),
}

/// Returns the rule that the log stores for an update by Adam on float32 moments. The update multiplies the gradient by
/// each factor, one after the other.
fn adam_rule(hyperparameters: &Hyperparameters, factors: &[f32]) -> Result<LoggedRule> {
    Ok(rule(ADAM, ADAM_ARITHMETIC, &scalar_numbers(&hyperparameters.scalars()?), factors))
}

/// Returns the rule that the log stores for an update of the record `described`. The update multiplies the gradient by
/// each factor, one after the other.
pub fn rule_of(described: &Record, numbers: &Rule, factors: &[f32]) -> Result<LoggedRule> {
    match numbers {
        Rule::Adam(numbers) if !is_reduced(described) => adam_rule(numbers, factors),
        Rule::Adam(numbers) => Ok(rule(REDUCED_ADAM, REDUCED_ARITHMETIC, &adam_numbers(numbers), factors)),
        Rule::Momentum(numbers) => {
            let name = if is_reduced(described) { REDUCED_MOMENTUM } else { MOMENTUM };
            Ok(rule(name, REDUCED_ARITHMETIC, &momentum_numbers(numbers), factors))
        }
    }
}

fn rule(name: &str, arithmetic: u32, numbers: &[(&str, u64)], factors: &[f32]) -> LoggedRule {
    let numbers = numbers.iter().map(|&(name, number)| (name.into(), number)).collect();
    LoggedRule {
        name: name.into(),
        arithmetic,
        numbers,
        factors: factors.iter().map(|factor| factor.to_bits()).collect(),
    }
}

/// A type of number that the log stores as bits.
trait Number: Sized {
    fn to_log(self) -> u64;
    fn from_log(bits: u64) -> Option<Self>;
}

macro_rules! numbers {
    ($($of:ty: |$number:ident| $to:expr, |$bits:ident| $from:expr;)*) => {$(
        impl Number for $of {
            fn to_log(self) -> u64 {
                let $number = self;
                $to
            }

            fn from_log($bits: u64) -> Option<Self> {
                $from
            }
        }
    )*};
}

numbers! {
    f32: |number| u64::from(number.to_bits()), |bits| u32::try_from(bits).ok().map(Self::from_bits);
    f64: |number| number.to_bits(), |bits| Some(Self::from_bits(bits));
    bool: |number| u64::from(number), |bits| Some(bits != 0);
    u64: |number| number, |bits| Some(bits);
}

/// Returns the number that the rule stores under `name`. Returns an error if the rule has no such number, or if its
/// bits are not an `N`.
fn number<N: Number>(rule: &LoggedRule, name: &str) -> Result<N> {
    let kernel = &rule.name;
    let found = rule.numbers.iter().find(|(known, _)| known == name);
    let lacks =
        || Error::Invalid(format!("the log's rule {kernel:?} has no {name:?}: use the version that wrote the store"));
    let &(_, bits) = found.ok_or_else(lacks)?;
    let wrong =
        || Error::Invalid(format!("the log's {name:?}, {bits:#x}, is not a float32: use the version that wrote it"));
    N::from_log(bits).ok_or_else(wrong)
}

/// Defines two functions for a struct. The first function encodes the fields for the log, each field under its name.
/// The second function decodes the fields.
macro_rules! named_numbers {
    ($of:ident, $encode:ident, $decode:ident, [$($field:ident),*]) => {
        fn $encode(of: &$of) -> Vec<(&'static str, u64)> {
            vec![$((stringify!($field), of.$field.to_log())),*]
        }

        fn $decode(rule: &LoggedRule) -> Result<$of> {
            Ok($of { $($field: number(rule, stringify!($field))?),* })
        }
    };
}

named_numbers!(
    Scalars,
    scalar_numbers,
    scalars,
    [grad_factor, decay, l2, first_weight, from_gradient, beta2, one_minus_beta2, bias2_root, eps, step_size]
);
named_numbers!(
    Hyperparameters,
    adam_numbers,
    adam,
    [lr, beta1, beta2, eps, weight_decay, decoupled, step, grad_scale, maximize, seed]
);
named_numbers!(
    Momentum,
    momentum_numbers,
    momentum,
    [lr, momentum, dampening, weight_decay, nesterov, step, grad_scale, maximize, seed]
);

/// Decodes a rule and its factors. Returns an error if this version of memascend does not know the rule, or if a number
/// of the rule is missing or does not fit its type.
pub(crate) fn taken(rule: &LoggedRule) -> Result<(Taken, Vec<f32>)> {
    let taken = match (rule.name.as_str(), rule.arithmetic) {
        (ADAM, ADAM_ARITHMETIC) => Taken::Single(scalars(rule)?),
        (REDUCED_ADAM, REDUCED_ARITHMETIC) => Taken::Reduced(adam(rule)?.into()),
        (REDUCED_MOMENTUM, REDUCED_ARITHMETIC) => Taken::Reduced(momentum(rule)?.into()),
        (MOMENTUM, REDUCED_ARITHMETIC) => Taken::Momentum(momentum(rule)?),
        (name, arithmetic) => {
            return Err(Error::Invalid(format!(
                "the store's log has gradients for the rule {name:?} with arithmetic {arithmetic}, which this version \
                 of memascend does not know: open the store with the version that wrote the log, and close the store \
                 there"
            )));
        }
    };
    Ok((taken, rule.factors.iter().map(|&bits| f32::from_bits(bits)).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADAM_NUMBERS: Hyperparameters = Hyperparameters {
        lr: 1e-3,
        beta1: 0.4,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        decoupled: true,
        step: 3,
        grad_scale: 0.5,
        maximize: true,
        seed: u64::MAX,
    };
    const MOMENTUM_NUMBERS: Momentum = Momentum {
        lr: 1e-3,
        momentum: 0.9,
        dampening: 0.1,
        weight_decay: 0.01,
        nesterov: true,
        step: 3,
        grad_scale: 0.5,
        maximize: true,
        seed: 7,
    };

    fn reduced(name: &str, numbers: &[(&str, u64)]) -> LoggedRule {
        rule(name, REDUCED_ARITHMETIC, numbers, &[0.5, -3.0])
    }

    #[test]
    fn logged_rule_decodes_to_its_scalars_and_factors() -> Result<()> {
        let (single, factors) = taken(&adam_rule(&ADAM_NUMBERS, &[0.5, -3.0])?)?;
        assert!(matches!(single, Taken::Single(scalars) if scalars == ADAM_NUMBERS.scalars()?));
        assert_eq!(factors, [0.5, -3.0]);
        let (adam, _) = taken(&reduced(REDUCED_ADAM, &adam_numbers(&ADAM_NUMBERS)))?;
        assert_eq!(format!("{adam:?}"), format!("{:?}", Taken::Reduced(ADAM_NUMBERS.into())));
        let (momentum, _) = taken(&reduced(REDUCED_MOMENTUM, &momentum_numbers(&MOMENTUM_NUMBERS)))?;
        assert_eq!(format!("{momentum:?}"), format!("{:?}", Taken::Reduced(MOMENTUM_NUMBERS.into())));
        Ok(())
    }

    #[test]
    fn decoding_error_names_the_unknown_arithmetic_or_bad_number() -> Result<()> {
        let rule = adam_rule(&ADAM_NUMBERS, &[])?;
        let other = LoggedRule { arithmetic: 2, ..rule.clone() };
        assert!(taken(&other).is_err_and(|error| error.to_string().contains("\"adam\" with arithmetic 2")));
        let other = LoggedRule { numbers: rule.numbers[1..].to_vec(), ..rule.clone() };
        assert!(taken(&other).is_err_and(|error| error.to_string().contains("has no \"grad_factor\"")));
        let numbers = rule.numbers.iter().map(|(name, bits)| (name.clone(), bits | 1 << 40)).collect();
        assert!(taken(&LoggedRule { numbers, ..rule }).is_err_and(|error| error.to_string().contains("not a float32")));
        Ok(())
    }

    #[test]
    fn numbers_of_the_reduced_rules_fit_in_a_log_head() {
        for (name, numbers) in [
            (REDUCED_ADAM, &adam_numbers(&ADAM_NUMBERS)[..]),
            (REDUCED_MOMENTUM, &momentum_numbers(&MOMENTUM_NUMBERS)[..]),
        ] {
            let bytes = name.len() + numbers.iter().map(|(name, _)| name.len() + 10).sum::<usize>();
            assert!(bytes + 100 < 512, "{name}: {bytes}");
        }
    }
}
