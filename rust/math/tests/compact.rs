//! Tests that training on split masters gives the same bits as training on whole masters. A split master is stored as a
//! bf16 value and 16 lower bits.

use std::num::NonZeroUsize;

use memascend_math::{
    AdamState, Bf16, CompactState, Element, Exec, Floats, FloatsMut, Hyperparameters, Moments, Reduced, Simd, Weights,
    WideState, adam, adam_compact, decode, encode,
};

fn execs() -> Vec<Exec> {
    let exec = Exec::new(NonZeroUsize::MIN).unwrap_or_else(|error| panic!("{error}"));
    Simd::available().into_iter().map(|simd| exec.with_simd(simd)).collect()
}

/// Returns a state whose master is split into `values` and `rest`.
fn reduced<'a>(values: &'a mut [Bf16], rest: &'a mut [u16], [first, second]: [&'a mut [f32]; 2]) -> Reduced<'a> {
    let weights = Weights::Compact { values, rest, rounded_up: None };
    Reduced { weights, moments: Moments::Single(first, Some(second)) }
}

fn numbers(step: u64) -> Hyperparameters {
    Hyperparameters {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.1,
        decoupled: step.is_multiple_of(2),
        step,
        grad_scale: 0.5,
        maximize: false,
        seed: 0,
    }
}

/// One parameter in two forms: with a whole master and with a split master. The two forms start with equal moments and
/// get the same gradients.
struct Pair {
    whole: [Vec<f32>; 3],
    out: Vec<Bf16>,
    values: Vec<Bf16>,
    rest: Vec<u16>,
    moments: [Vec<f32>; 2],
}

fn noise(seed: u32) -> impl FnMut() -> u32 {
    let mut state = u64::from(seed) << 1 | 1;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    }
}

impl Pair {
    fn new(len: usize, seed: u32, wild: bool, exec: Exec) -> Self {
        let mut next = noise(seed);
        // Without `wild`, numbers have magnitudes from 1/2 to 1, where an update of about `lr` is not lost in rounding.
        let mut number = || f32::from_bits(if wild { next() } else { next() & 0x807F_FFFF | 0x3F00_0000 });
        let master: Vec<f32> = (0..len).map(|_| number()).collect();
        let exp_avg: Vec<f32> = (0..len).map(|_| number()).collect();
        let exp_avg_sq: Vec<f32> = (0..len).map(|_| number().abs()).collect();
        let (mut values, mut rest) = (vec![Bf16(0); len], vec![0; len]);
        let mut moments = [exp_avg.clone(), exp_avg_sq.clone()];
        let state = reduced(&mut values, &mut rest, moments.each_mut().map(Vec::as_mut_slice));
        let wide = WideState { master: Some(&master[..]), ..WideState::default() };
        encode(wide, state, exec).unwrap_or_else(|error| panic!("{error}"));
        Self { whole: [master, exp_avg, exp_avg_sq], out: vec![Bf16(0); len], values, rest, moments }
    }

    fn step(&mut self, grad: Floats<'_>, step: u64, exec: Exec) {
        let scalars = numbers(step).scalars().unwrap_or_else(|error| panic!("{error}"));
        let [master, exp_avg, exp_avg_sq] = &mut self.whole;
        let state = AdamState { master, exp_avg, exp_avg_sq };
        let whole = adam(state, grad, Some(FloatsMut::Bf16(&mut self.out)), &scalars, exec);
        let [exp_avg, exp_avg_sq] = &mut self.moments;
        let state = CompactState { values: &mut self.values, rest: &mut self.rest, exp_avg, exp_avg_sq };
        whole.and_then(|()| adam_compact(state, grad, &scalars, exec)).unwrap_or_else(|error| panic!("{error}"));
    }

    fn check(&mut self, exec: Exec) {
        let mut found = self.moments.clone().map(|moment| vec![0.0; moment.len()]);
        let [master, exp_avg_sq] = found.each_mut().map(Vec::as_mut_slice);
        let wide = WideState { master: Some(master), second: Some(exp_avg_sq), ..WideState::default() };
        let state = reduced(&mut self.values, &mut self.rest, self.moments.each_mut().map(Vec::as_mut_slice));
        decode(state, wide, exec).unwrap_or_else(|error| panic!("{error}"));
        let ([master, exp_avg_sq], exp_avg) = (&found, &self.moments[0]);
        let same = |one: &f32, other: &f32| one.to_bits() == other.to_bits() || one.is_nan() && other.is_nan();
        for (whole, found) in self.whole.iter().zip([master, exp_avg, exp_avg_sq]) {
            let different = whole.iter().zip(found).position(|(one, other)| !same(one, other));
            assert_eq!(different.map(|i| (i, whole[i], found[i])), None, "{exec:?}");
        }
        assert!(self.out.iter().zip(&self.values).all(|(one, other)| same(&one.to_f32(), &other.to_f32())));
    }
}

#[test]
fn adam_compact_has_the_bits_of_adam_on_whole_masters() {
    for exec in execs() {
        for (len, wild) in [(1, false), (1031, false), (4096, true), (20_011, false)] {
            let (mut pair, mut next) = (Pair::new(len, 7, wild, exec), noise(3));
            for step in 1..=40 {
                let grad: Vec<f32> = (0..len).map(|_| f32::from_bits(next() & 0x807F_FFFF | 0x3E80_0000)).collect();
                let half: Vec<Bf16> = grad.iter().map(|value| Bf16::from_f32(*value)).collect();
                pair.step(if step % 3 == 0 { Floats::F32(&grad) } else { Floats::Bf16(&half) }, step, exec);
                pair.check(exec);
            }
        }
    }
}

#[test]
fn adam_compact_rejects_slices_of_different_lengths() {
    let (mut values, mut rest, mut first, mut second) = ([Bf16(0); 8], [0; 7], [0.0; 8], [0.0; 8]);
    let state = CompactState { values: &mut values, rest: &mut rest, exp_avg: &mut first, exp_avg_sq: &mut second };
    let scalars = numbers(1).scalars().unwrap_or_else(|error| panic!("{error}"));
    let message = adam_compact(state, Floats::F32(&[1.0; 8]), &scalars, execs()[0]).map_err(|error| error.to_string());
    assert_eq!(message, Err("rest has 7 elements but needs 8 to match values: pass slices that match".into()));
    assert!(values.iter().all(|value| value.0 == 0));
}
