//! Tests `AdamW` and `Adam` against the formulas of their papers, computed in f64 over several steps.

use std::num::NonZeroUsize;

use memascend_math::{AdamState, Exec, Floats, Hyperparameters, adam};

const STEPS: u64 = 12;

/// One element. `step` updates it by the formulas of the papers, without any code of the kernel.
#[derive(Debug, Clone, Copy)]
struct Textbook {
    parameter: f64,
    first: f64,
    second: f64,
}

impl Textbook {
    fn step(&mut self, gradient: f64, of: &Hyperparameters) {
        let sign = if of.maximize { -1.0 } else { 1.0 };
        let mut gradient = sign * gradient * of.grad_scale;
        if of.decoupled {
            self.parameter -= of.lr * of.weight_decay * self.parameter;
        } else {
            gradient += of.weight_decay * self.parameter;
        }
        self.first = of.beta1 * self.first + (1.0 - of.beta1) * gradient;
        self.second = of.beta2 * self.second + (1.0 - of.beta2) * gradient * gradient;
        let mut powers = (1.0, 1.0);
        for _ in 0..of.step {
            powers = (powers.0 * of.beta1, powers.1 * of.beta2);
        }
        let first = self.first / (1.0 - powers.0);
        let second = self.second / (1.0 - powers.1);
        self.parameter -= of.lr * first / (second.sqrt() + of.eps);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the test compares fp32")]
fn compare(of: Hyperparameters) {
    let exec = Exec::new(NonZeroUsize::MIN).unwrap_or_else(|error| panic!("{error}"));
    let gradients = |step: u64| [0.5, -2.0, 1e-3, 30.0].map(|of: f64| of * (1.0 + f64::from(step as u32 % 3)));
    let mut expected = [1.0, -0.5, 0.25, 2.0].map(|parameter| Textbook { parameter, first: 0.0, second: 0.0 });
    let mut master = expected.map(|of| of.parameter as f32);
    let (mut first, mut second) = ([0.0; 4], [0.0; 4]);
    for step in 1..=STEPS {
        let of = Hyperparameters { step, ..of };
        let scalars = of.scalars().unwrap_or_else(|error| panic!("{error}"));
        let given = gradients(step).map(|of| of as f32);
        let state = AdamState { master: &mut master, exp_avg: &mut first, exp_avg_sq: &mut second };
        adam(state, Floats::F32(&given), None, &scalars, exec).unwrap_or_else(|error| panic!("{error}"));
        for (one, gradient) in expected.iter_mut().zip(gradients(step)) {
            one.step(gradient, &of);
        }
        for (index, one) in expected.iter().enumerate() {
            let close = |got: f32, wanted: f64| (f64::from(got) - wanted).abs() <= 2e-6 * wanted.abs().max(0.1);
            assert!(close(master[index], one.parameter), "step {step}: {} and {one:?}, {of:?}", master[index]);
            assert!(close(first[index], one.first), "step {step}: {} and {one:?}, {of:?}", first[index]);
            assert!(close(second[index], one.second), "step {step}: {} and {one:?}, {of:?}", second[index]);
        }
    }
}

#[test]
fn adam_steps_match_the_published_formula() {
    let usual = Hyperparameters {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        decoupled: true,
        step: 1,
        grad_scale: 1.0,
        maximize: false,
        seed: 0,
    };
    compare(usual);
    compare(Hyperparameters { decoupled: false, ..usual });
    compare(Hyperparameters { maximize: true, ..usual });
    compare(Hyperparameters { grad_scale: 0.25, ..usual });
    compare(Hyperparameters { beta1: 0.3, beta2: 0.7, eps: 1e-2, ..usual });
    compare(Hyperparameters { beta1: 0.0, weight_decay: 0.0, ..usual });
}
