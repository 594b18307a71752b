//! Tests the split master: all 2^32 values survive, and training on it equals training on the whole.

use std::num::NonZeroUsize;

use memascend_math::{
    Bf16, CompactState, Element, Exec, Floats, FloatsMut, Hyperparameters, Simd, State, adam, adam_compact,
    join_master, split_master,
};

/// Everything that a second moment can be; a NaN of either sign.
const MOMENTS: [u32; 8] = [0, 1, 0x007F_FFFF, 0x3F80_0000, 0x7F7F_FFFF, 0x7F80_0000, 0x7FC0_0000, 0xFFC0_1234];

const QUIET: u32 = 0x0040_0000;

fn execs() -> Vec<Exec> {
    let exec = Exec::new(NonZeroUsize::MIN).unwrap_or_else(|error| panic!("{error}"));
    Simd::available().into_iter().map(|simd| exec.with_simd(simd)).collect()
}

fn is_nan(bits: u32) -> bool {
    bits & 0x7FFF_FFFF > 0x7F80_0000
}

struct Trip {
    lowers: Vec<u32>,
    moments: Vec<u32>,
    master: Vec<f32>,
    values: Vec<Bf16>,
    rest: Vec<u16>,
    exp_avg_sq: Vec<f32>,
    back: Vec<f32>,
}

impl Trip {
    /// For masters with these lower halves.
    fn new(lowers: Vec<u32>) -> Self {
        let len = lowers.len();
        Self {
            moments: MOMENTS.iter().copied().cycle().take(len + MOMENTS.len()).collect(),
            master: vec![0.0; len],
            values: vec![Bf16(0); len],
            rest: vec![0; len],
            exp_avg_sq: vec![0.0; len],
            back: vec![0.0; len],
            lowers,
        }
    }

    /// There and back, for the masters below one upper half.
    fn check(&mut self, upper: u32, exec: Exec) {
        let (lowers, len) = (&self.lowers[..], self.lowers.len());
        let moments = &self.moments[upper as usize % MOMENTS.len()..][..len];
        self.master.iter_mut().zip(lowers).for_each(|(to, lower)| *to = f32::from_bits(upper << 16 | lower));
        self.exp_avg_sq.iter_mut().zip(moments).for_each(|(to, moment)| *to = f32::from_bits(*moment));
        split_master(&self.master, &mut self.values, &mut self.rest, &mut self.exp_avg_sq, exec)
            .and_then(|()| join_master(&self.values, &self.rest, &mut self.exp_avg_sq, &mut self.back, exec))
            .unwrap_or_else(|error| panic!("{error}"));
        let (values, back, exp_avg_sq) = (&self.values[..len], &self.back[..len], &self.exp_avg_sq[..len]);
        // Collected without a branch, which is several times faster.
        let wrong = (0..len).fold(0, |wrong, i| {
            let bits = upper << 16 | lowers[i];
            let wanted = if is_nan(bits) { bits | QUIET } else { bits };
            let value = values[i].0 ^ Bf16::from_f32(f32::from_bits(bits)).0;
            let moment = exp_avg_sq[i].to_bits() ^ moments[i] & 0x7FFF_FFFF;
            wrong | back[i].to_bits() ^ wanted | u32::from(value) | moment
        });
        assert_eq!(wrong, 0, "below {upper:04x}, {exec:?}: bits that differ");
    }
}

/// Around zero, the tie and the end, where roundings change; and a spread of others.
fn edges() -> Vec<u32> {
    let spread = (0..32_u32).map(|i| i.wrapping_mul(0x9E37_79B1) >> 16);
    [0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF].into_iter().chain(spread).collect()
}

#[test]
fn every_upper_half_with_lower_halves_around_every_rounding() {
    for exec in execs() {
        let mut trip = Trip::new(edges());
        (0..=0xFFFF).step_by(stride()).for_each(|upper| trip.check(upper, exec));
    }
}

#[test]
fn every_master_survives() {
    let mut trip = Trip::new((0..=0xFFFF).collect());
    (0..=0xFFFF).step_by(stride()).for_each(|upper| trip.check(upper, execs()[0]));
}

/// 1: every one. Under Valgrind, which looks for other things, few.
fn stride() -> usize {
    if std::env::var_os("MEMASCEND_TEST_SHORT").is_some() { 4999 } else { 1 }
}

/// A parameter, whole and split: the same moments, and masters that are spread over everything there is.
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
        // Tame ones lie around one, where every step moves them.
        let mut number = || f32::from_bits(if wild { next() } else { next() & 0x807F_FFFF | 0x3F00_0000 });
        let master: Vec<f32> = (0..len).map(|_| number()).collect();
        let exp_avg: Vec<f32> = (0..len).map(|_| number()).collect();
        let exp_avg_sq: Vec<f32> = (0..len).map(|_| number().abs()).collect();
        let (mut values, mut rest, mut signed) = (vec![Bf16(0); len], vec![0; len], exp_avg_sq.clone());
        split_master(&master, &mut values, &mut rest, &mut signed, exec).unwrap_or_else(|error| panic!("{error}"));
        let moments = [exp_avg.clone(), signed];
        Self { whole: [master, exp_avg, exp_avg_sq], out: vec![Bf16(0); len], values, rest, moments }
    }

    fn step(&mut self, grad: Floats<'_>, step: u64, exec: Exec) {
        let scalars = Hyperparameters {
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
        };
        let scalars = scalars.scalars().unwrap_or_else(|error| panic!("{error}"));
        let [master, exp_avg, exp_avg_sq] = &mut self.whole;
        let state = State { master, exp_avg, exp_avg_sq };
        let whole = adam(state, grad, Some(FloatsMut::Bf16(&mut self.out)), &scalars, exec);
        let [exp_avg, exp_avg_sq] = &mut self.moments;
        let state = CompactState { values: &mut self.values, rest: &mut self.rest, exp_avg, exp_avg_sq };
        whole.and_then(|()| adam_compact(state, grad, &scalars, exec)).unwrap_or_else(|error| panic!("{error}"));
    }

    fn check(&self, exec: Exec) {
        let [exp_avg, signed] = &self.moments;
        let (mut exp_avg_sq, mut master) = (signed.clone(), vec![0.0; signed.len()]);
        join_master(&self.values, &self.rest, &mut exp_avg_sq, &mut master, exec)
            .unwrap_or_else(|error| panic!("{error}"));
        let same = |one: &f32, other: &f32| one.to_bits() == other.to_bits() || one.is_nan() && other.is_nan();
        for (whole, found) in self.whole.iter().zip([&master, exp_avg, &exp_avg_sq]) {
            let different = whole.iter().zip(found).position(|(one, other)| !same(one, other));
            assert_eq!(different.map(|i| (i, whole[i], found[i])), None, "{exec:?}");
        }
        assert!(self.out.iter().zip(&self.values).all(|(one, other)| same(&one.to_f32(), &other.to_f32())));
    }
}

#[test]
fn training_on_split_masters_is_training_on_whole_ones() {
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
fn lengths_that_differ_are_refused() {
    let exec = execs()[0];
    let (mut values, mut rest, mut moment) = (vec![Bf16(0); 8], vec![0_u16; 7], vec![0.0_f32; 8]);
    let refused = split_master(&[1.0; 8], &mut values, &mut rest, &mut moment, exec);
    let message = refused.map_err(|error| error.to_string());
    assert_eq!(message, Err("rest has 7 elements and master has 8: they must agree".into()));
    assert!(join_master(&values, &rest, &mut moment, &mut [0.0; 8], exec).is_err());
    assert!(values.iter().all(|value| value.0 == 0));
}
