//! Encodes for the log what a gradient is applied with, and decodes it.

use memascend_math::{ADAM_ARITHMETIC, Hyperparameters, Momentum, REDUCED_ARITHMETIC, Rule as Numbers, Scalars};
use memascend_store::{Entry, Rule};

use crate::{Error, Result, reduced::is_reduced};

/// Adam on float32 moments: by what it computes with.
const ADAM: &str = "adam";
/// SGD on state as torch has it, with momentum or without: by what it was asked for.
const MOMENTUM: &str = "momentum";
/// Adam and momentum on state in a format of its own: by what they were asked for.
const REDUCED_ADAM: &str = "adam in a format";
const REDUCED_MOMENTUM: &str = "momentum in a format";

/// What a gradient is applied with, as the log says it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Taken {
    Single(Scalars),
    Reduced(Numbers),
    Momentum(Momentum),
}

/// What a gradient is applied with whose update has these hyperparameters, after it was multiplied by each factor in turn.
fn adam_rule(hyperparameters: &Hyperparameters, factors: &[f32]) -> Result<Rule> {
    let scalars = hyperparameters.scalars()?;
    let numbers = scalar_numbers(&scalars).map(|(name, number)| (name, u64::from(number)));
    Ok(rule(ADAM, ADAM_ARITHMETIC, &numbers, factors))
}

/// What the log says of an update of an entry by a gradient that was multiplied by each factor in turn.
pub fn rule_of(described: &Entry, numbers: &Numbers, factors: &[f32]) -> Result<Rule> {
    match numbers {
        Numbers::Adam(numbers) if !is_reduced(described) => adam_rule(numbers, factors),
        Numbers::Adam(numbers) => Ok(rule(REDUCED_ADAM, REDUCED_ARITHMETIC, &adam_numbers(numbers), factors)),
        Numbers::Momentum(numbers) => {
            let name = if is_reduced(described) { REDUCED_MOMENTUM } else { MOMENTUM };
            Ok(rule(name, REDUCED_ARITHMETIC, &momentum_numbers(numbers), factors))
        }
    }
}

fn rule(name: &str, arithmetic: u32, numbers: &[(&str, u64)], factors: &[f32]) -> Rule {
    let numbers = numbers.iter().map(|&(name, number)| (name.into(), number)).collect();
    Rule { name: name.into(), arithmetic, numbers, factors: factors.iter().map(|factor| factor.to_bits()).collect() }
}

fn scalar_numbers(scalars: &Scalars) -> [(&'static str, u32); 10] {
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

fn adam_numbers(numbers: &Hyperparameters) -> [(&'static str, u64); 10] {
    [
        ("lr", numbers.lr.to_bits()),
        ("beta1", numbers.beta1.to_bits()),
        ("beta2", numbers.beta2.to_bits()),
        ("eps", numbers.eps.to_bits()),
        ("weight_decay", numbers.weight_decay.to_bits()),
        ("decoupled", u64::from(numbers.decoupled)),
        ("step", numbers.step),
        ("grad_scale", numbers.grad_scale.to_bits()),
        ("maximize", u64::from(numbers.maximize)),
        ("seed", numbers.seed),
    ]
}

fn momentum_numbers(numbers: &Momentum) -> [(&'static str, u64); 9] {
    [
        ("lr", numbers.lr.to_bits()),
        ("momentum", numbers.momentum.to_bits()),
        ("dampening", numbers.dampening.to_bits()),
        ("weight_decay", numbers.weight_decay.to_bits()),
        ("nesterov", u64::from(numbers.nesterov)),
        ("step", numbers.step),
        ("grad_scale", numbers.grad_scale.to_bits()),
        ("maximize", u64::from(numbers.maximize)),
        ("seed", numbers.seed),
    ]
}

/// What a rule says, and its factors; an error where it is none that is known here.
pub(crate) fn taken(rule: &Rule) -> Result<(Taken, Vec<f32>)> {
    let said = Said(rule);
    let taken = match (rule.name.as_str(), rule.arithmetic) {
        (ADAM, ADAM_ARITHMETIC) => Taken::Single(said.scalars()?),
        (REDUCED_ADAM, REDUCED_ARITHMETIC) => Taken::Reduced(said.adam()?.into()),
        (REDUCED_MOMENTUM, REDUCED_ARITHMETIC) => Taken::Reduced(said.momentum()?.into()),
        (MOMENTUM, REDUCED_ARITHMETIC) => Taken::Momentum(said.momentum()?),
        (name, arithmetic) => {
            return Err(Error::Invalid(format!(
                "the store's log has gradients for {name:?} with arithmetic {arithmetic}, which this version of memascend \
                 does not know: open the store with the version that wrote it, and close it there"
            )));
        }
    };
    Ok((taken, rule.factors.iter().map(|&bits| f32::from_bits(bits)).collect()))
}

/// A rule's numbers, by their names.
struct Said<'a>(&'a Rule);

impl Said<'_> {
    fn number(&self, name: &str) -> Result<u64> {
        let found = self.0.numbers.iter().find(|(known, _)| known == name);
        let kernel = &self.0.name;
        let lacks = || Error::Invalid(format!("the store's log says nothing of {name:?} for {kernel:?}"));
        found.map(|&(_, bits)| bits).ok_or_else(lacks)
    }

    fn single(&self, name: &str) -> Result<f32> {
        let bits = self.number(name)?;
        let wrong = |_| Error::Invalid(format!("the store's log says {bits:#x} of {name:?}, which is no float32"));
        u32::try_from(bits).map(f32::from_bits).map_err(wrong)
    }

    fn double(&self, name: &str) -> Result<f64> {
        self.number(name).map(f64::from_bits)
    }

    fn flag(&self, name: &str) -> Result<bool> {
        self.number(name).map(|bits| bits != 0)
    }

    fn scalars(&self) -> Result<Scalars> {
        Ok(Scalars {
            grad_factor: self.single("grad_factor")?,
            decay: self.single("decay")?,
            l2: self.single("l2")?,
            first_weight: self.single("first_weight")?,
            from_gradient: self.flag("from_gradient")?,
            beta2: self.single("beta2")?,
            one_minus_beta2: self.single("one_minus_beta2")?,
            bias2_root: self.single("bias2_root")?,
            eps: self.single("eps")?,
            step_size: self.single("step_size")?,
        })
    }

    fn adam(&self) -> Result<Hyperparameters> {
        Ok(Hyperparameters {
            lr: self.double("lr")?,
            beta1: self.double("beta1")?,
            beta2: self.double("beta2")?,
            eps: self.double("eps")?,
            weight_decay: self.double("weight_decay")?,
            decoupled: self.flag("decoupled")?,
            step: self.number("step")?,
            grad_scale: self.double("grad_scale")?,
            maximize: self.flag("maximize")?,
            seed: self.number("seed")?,
        })
    }

    fn momentum(&self) -> Result<Momentum> {
        Ok(Momentum {
            lr: self.double("lr")?,
            momentum: self.double("momentum")?,
            dampening: self.double("dampening")?,
            weight_decay: self.double("weight_decay")?,
            nesterov: self.flag("nesterov")?,
            step: self.number("step")?,
            grad_scale: self.double("grad_scale")?,
            maximize: self.flag("maximize")?,
            seed: self.number("seed")?,
        })
    }
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

    fn reduced(name: &str, numbers: &[(&str, u64)]) -> Rule {
        rule(name, REDUCED_ARITHMETIC, numbers, &[0.5, -3.0])
    }

    #[test]
    fn what_was_said_is_taken() -> Result<()> {
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
    fn what_is_not_known_is_refused_by_its_name() -> Result<()> {
        let rule = adam_rule(&ADAM_NUMBERS, &[])?;
        let other = Rule { arithmetic: 2, ..rule.clone() };
        assert!(taken(&other).is_err_and(|error| error.to_string().contains("\"adam\" with arithmetic 2")));
        let other = Rule { numbers: rule.numbers[1..].to_vec(), ..rule.clone() };
        assert!(taken(&other).is_err_and(|error| error.to_string().contains("nothing of \"grad_factor\"")));
        let numbers = rule.numbers.iter().map(|(name, bits)| (name.clone(), bits | 1 << 40)).collect();
        assert!(taken(&Rule { numbers, ..rule }).is_err_and(|error| error.to_string().contains("no float32")));
        Ok(())
    }

    #[test]
    fn what_it_takes_has_room_in_a_head() {
        for (name, numbers) in [
            (REDUCED_ADAM, &adam_numbers(&ADAM_NUMBERS)[..]),
            (REDUCED_MOMENTUM, &momentum_numbers(&MOMENTUM_NUMBERS)[..]),
        ] {
            let bytes = name.len() + numbers.iter().map(|(name, _)| name.len() + 10).sum::<usize>();
            assert!(bytes + 100 < 512, "{name}: {bytes}");
        }
    }
}
