//! Tests updates of optimizer state in reduced precision, on every instruction set of this processor. The reference is
//! plain code that updates one element at a time. All tensors of the state lie next to inaccessible pages.
//!
//! A shard must get the same bits as the same range in an update of the whole parameter. With 8-bit moments, the shard
//! must begin at the start of a block.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::many_single_char_names,
    reason = "numbers are small, and p, g, m and v are the formula's names"
)]

use std::num::NonZeroUsize;

use memascend_math::{
    Bf16, Codes, Element, Exec, F16, Floats, FloatsMut, Hyperparameters, Moments, Momentum, Position, Random, Reduced,
    Rule, Simd, Weights, WideState, decode, encode, update,
};
use proptest::prelude::*;

mod guard;
use guard::Guarded;

/// The format of a parameter and of its master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weight {
    Single,
    MasterBf16,
    MasterF16,
    Compact,
    StochasticBf16,
    StochasticF16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    Single,
    Bf16,
    Blocks,
}

const WEIGHTS: [Weight; 6] = [
    Weight::Single,
    Weight::MasterBf16,
    Weight::MasterF16,
    Weight::Compact,
    Weight::StochasticBf16,
    Weight::StochasticF16,
];
const MOMENTS: [Moment; 3] = [Moment::Single, Moment::Bf16, Moment::Blocks];

#[derive(Debug, Clone, Copy)]
struct Form {
    weight: Weight,
    moment: Moment,
    has_second: bool,
}

impl Form {
    fn has_bits(self) -> bool {
        !self.has_second || self.moment == Moment::Blocks
    }
}

/// The tensors of a state, each between inaccessible pages. `parts` has room for the tensors of every format, and
/// `form` selects the tensors that the test uses.
struct Memory {
    len: usize,
    form: Form,
    at_end: bool,
    parts: Vec<Guarded>,
}

const WIDE: usize = 0;
const NARROW: usize = 1;
const REST: usize = 2;
const BITS: usize = 3;
const FIRST: usize = 4;
const SECOND: usize = 5;
const ABSMAX: usize = 6;
const ABSMAX_SQ: usize = 7;

impl Memory {
    fn new(form: Form, len: usize, at_end: bool) -> Self {
        let parts = (0..8).map(|_| Guarded::new(len * 4)).collect();
        Self { len, form, at_end, parts }
    }

    fn slice<T: Copy>(&self, part: usize, len: usize) -> &mut [T] {
        self.parts[part].slice(len, self.at_end)
    }

    fn state(&self) -> Reduced<'_> {
        let (len, blocks) = (self.len, self.len.div_ceil(256));
        let weights = match self.form.weight {
            Weight::Single => Weights::Single(self.slice(WIDE, len)),
            Weight::MasterBf16 => {
                Weights::Master { master: self.slice(WIDE, len), values: FloatsMut::Bf16(self.slice(NARROW, len)) }
            }
            Weight::MasterF16 => {
                Weights::Master { master: self.slice(WIDE, len), values: FloatsMut::F16(self.slice(NARROW, len)) }
            }
            Weight::Compact => Weights::Compact {
                values: self.slice(NARROW, len),
                rest: self.slice(REST, len),
                rounded_up: self.form.has_bits().then(|| self.slice(BITS, len.div_ceil(8))),
            },
            Weight::StochasticBf16 => Weights::Stochastic(FloatsMut::Bf16(self.slice(NARROW, len))),
            Weight::StochasticF16 => Weights::Stochastic(FloatsMut::F16(self.slice(NARROW, len))),
        };
        let has_second = self.form.has_second;
        let moments = match self.form.moment {
            Moment::Single => Moments::Single(self.slice(FIRST, len), has_second.then(|| self.slice(SECOND, len))),
            Moment::Bf16 => Moments::Bf16(self.slice(FIRST, len), has_second.then(|| self.slice(SECOND, len))),
            Moment::Blocks => Moments::Blocks(
                Codes { codes: self.slice(FIRST, len), absmax: self.slice(ABSMAX, blocks) },
                has_second.then(|| Codes { codes: self.slice(SECOND, len), absmax: self.slice(ABSMAX_SQ, blocks) }),
            ),
        };
        Reduced { weights, moments }
    }

    fn bytes(&self) -> Vec<u8> {
        self.parts.iter().flat_map(|part| part.slice::<u8>(self.len * 4, self.at_end).to_vec()).collect()
    }

    /// Encodes the fp32 state `wide` in the formats that `self.form` names, and stores the result in this memory.
    fn begin(&self, wide: &Wide) {
        let second = self.form.has_second.then_some(&wide.second[..]);
        let given = WideState { master: Some(&wide.master[..]), first: Some(&wide.first[..]), second };
        encode(given, self.state(), exec(1, Simd::PORTABLE)).unwrap_or_else(|error| panic!("{error}"));
    }

    fn wide(&self) -> Wide {
        let mut wide = Wide::zeros(self.len);
        let second = self.form.has_second.then_some(&mut wide.second[..]);
        let asked = WideState { master: Some(&mut wide.master[..]), first: Some(&mut wide.first[..]), second };
        decode(self.state(), asked, exec(1, Simd::PORTABLE)).unwrap_or_else(|error| panic!("{error}"));
        wide
    }
}

#[derive(Debug, Clone)]
struct Wide {
    master: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Wide {
    fn zeros(len: usize) -> Self {
        Self { master: vec![0.0; len], first: vec![0.0; len], second: vec![0.0; len] }
    }

    /// Returns a state of random numbers of magnitudes up to 2, including zeros and denormals. With `wild`, some
    /// numbers have any bits, so that they may be larger, infinite or NaN.
    fn noise(len: usize, seed: u64, wild: bool) -> Self {
        let mut next = noise(seed);
        let mut wide = Self::zeros(len);
        for i in 0..len {
            wide.master[i] = number(&mut next, wild);
            wide.first[i] = number(&mut next, wild) * 0.1;
            wide.second[i] = number(&mut next, wild).abs() * 0.01;
        }
        wide
    }
}

fn noise(seed: u64) -> impl FnMut() -> u32 {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    }
}

fn number(next: &mut impl FnMut() -> u32, wild: bool) -> f32 {
    let bits = next();
    match next() % 16 {
        0 => 0.0,
        1 => f32::from_bits(bits & 0x807F_FFFF),
        2 if wild => f32::from_bits(bits),
        3 => f32::from_bits(bits & 0xBFFF_FFFF),
        _ => (f64::from(bits.cast_signed()) / 2.0_f64.powi(31)) as f32 * 2.0_f32.powi((next() % 12).cast_signed() - 10),
    }
}

fn exec(threads: usize, simd: Simd) -> Exec {
    let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
    Exec::new(threads).unwrap_or_else(|error| panic!("{error}")).with_simd(simd)
}

fn adam(decoupled: bool, step: u64) -> Hyperparameters {
    let (lr, beta1, beta2, eps, weight_decay) = (3e-3, 0.9, 0.999, 1e-8, 0.1);
    Hyperparameters { lr, beta1, beta2, eps, weight_decay, decoupled, step, grad_scale: 0.75, maximize: false, seed: 7 }
}

fn momentum(step: u64, nesterov: bool) -> Momentum {
    let (lr, momentum, weight_decay) = (0.05, 0.9, 0.01);
    let dampening = if nesterov { 0.0 } else { 0.25 };
    Momentum { lr, momentum, dampening, weight_decay, nesterov, step, grad_scale: 0.5, maximize: true, seed: 7 }
}

/// Returns the parameter and the moments of one element after a step. Computes in fp32, by the formulas that define the
/// optimizers.
fn element(rule: &Rule, decays: bool, (p, g, m, v): (f32, f32, f32, f32)) -> (f32, f32, f32) {
    match rule {
        Rule::Adam(of) => {
            let step = of.step as f64;
            let (bias1, bias2) = (1.0 - of.beta1.powf(step), 1.0 - of.beta2.powf(step));
            let p = if of.decoupled { p * (1.0 - of.lr * of.weight_decay) as f32 } else { p };
            let g = g * of.grad_scale as f32;
            let g = if of.decoupled { g } else { p.mul_add(of.weight_decay as f32, g) };
            let w = (1.0 - of.beta1) as f32;
            let m = if decays { g.mul_add(w, m * of.beta1 as f32) } else { w.mul_add(g - m, m) };
            let v = (g * (1.0 - of.beta2) as f32).mul_add(g, v * of.beta2 as f32);
            let denominator = v.sqrt() / bias2.sqrt() as f32 + of.eps as f32;
            (p + (m * -(of.lr / bias1) as f32) / denominator, m, v)
        }
        Rule::Momentum(of) => {
            let g = g * if of.maximize { -of.grad_scale } else { of.grad_scale } as f32;
            let g = p.mul_add(of.weight_decay as f32, g);
            let m = if of.step == 1 { g } else { g.mul_add((1.0 - of.dampening) as f32, m * of.momentum as f32) };
            let along = if of.nesterov { m.mul_add(of.momentum as f32, g) } else { m };
            (along.mul_add(-of.lr as f32, p), m, v)
        }
    }
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Returns the two 16-bit numbers between which `value` lies, converted to fp32. Stochastic rounding gives one of these
/// two numbers. Returns `value` twice if it is a 16-bit number itself.
fn neighbours(value: f32, is_f16: bool) -> [f32; 2] {
    let nearest = if is_f16 { F16::from_f32(value).0 } else { Bf16::from_f32(value).0 };
    let wide = |bits: u16| if is_f16 { F16(bits).to_f32() } else { Bf16(bits).to_f32() };
    let found = wide(nearest);
    let beside = if found.abs() < value.abs() { nearest + 1 } else { nearest.saturating_sub(1) };
    [
        found,
        if found.to_bits() == value.to_bits() || nearest.trailing_zeros() >= 15 && found.abs() >= value.abs() {
            found
        } else {
            wide(beside)
        },
    ]
}

fn check(form: Form, rule: &Rule, len: usize, seed: u64, at_end: bool, wild: bool) {
    let start = Wide::noise(len, seed, wild);
    let mut next = noise(seed ^ 0x55);
    let gradient: Vec<f32> = (0..len).map(|_| number(&mut next, wild)).collect();
    let place = Position { random: Random { key: seed, step: 5 }, first: 512 };
    let mut bytes: Option<Vec<u8>> = None;
    for simd in Simd::available() {
        let memory = Memory::new(form, len, at_end);
        memory.begin(&start);
        let before = memory.wide();
        let grad = Guarded::new(len * 4);
        let grad = grad.slice::<f32>(len, at_end);
        grad.copy_from_slice(&gradient);
        update(memory.state(), Floats::F32(grad), rule, place, exec(1, simd)).unwrap_or_else(|error| panic!("{error}"));
        let after = memory.wide();
        for (i, &g) in gradient.iter().enumerate() {
            let one = (before.master[i], g, before.first[i], before.second[i]);
            let (p, m, v) = element(rule, form.moment == Moment::Blocks, one);
            let got = (after.master[i], after.first[i], after.second[i]);
            let is_f16 = form.weight == Weight::StochasticF16;
            let round_stochastic =
                |wide: f32, got: f32, is_f16| neighbours(wide, is_f16).iter().any(|&near| same(near, got));
            let right_p = match form.weight {
                Weight::StochasticBf16 | Weight::StochasticF16 => round_stochastic(p, got.0, is_f16),
                _ => same(p, got.0),
            };
            assert!(right_p, "{form:?} {simd:?} {i}: {p:e} {got:?} of {one:?}");
            match form.moment {
                Moment::Single => assert!(same(m, got.1) && (!form.has_second || same(v, got.2)), "{form:?} {i}"),
                Moment::Bf16 => {
                    assert!(same(Bf16::from_f32(m).to_f32(), got.1), "{form:?} {i}: {m:e} {got:?}");
                    assert!(!form.has_second || round_stochastic(v, got.2, false), "{form:?} {i}: {v:e} {got:?}");
                    assert!(!form.has_second || got.2 >= 0.0 || got.2.is_nan());
                }
                // Checks only the sign of the second moment. Tests that compare with torch check the 8-bit codes.
                Moment::Blocks => assert!(!form.has_second || got.2 >= 0.0 || got.2.is_nan()),
            }
        }
        let found = memory.bytes();
        if !wild {
            assert!(bytes.as_ref().is_none_or(|bytes| *bytes == found), "{form:?} {simd:?}");
        }
        bytes = Some(found);
    }
}

fn forms() -> impl Iterator<Item = Form> {
    WEIGHTS.into_iter().flat_map(|weight| {
        MOMENTS.into_iter().flat_map(move |moment| {
            [true, false].into_iter().map(move |has_second| Form { weight, moment, has_second })
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn reduced_update_of_each_element_equals_the_formula(
        len in prop_oneof![0..70_usize, 250..260_usize, 500..530_usize, 2000..2100_usize],
        seed in any::<u64>(), at_end in any::<bool>(), wild in any::<bool>(), step in 1..4_u64, other in any::<bool>(),
    ) {
        for form in forms() {
            let rule = if form.has_second { Rule::Adam(adam(other, step)) } else { Rule::Momentum(momentum(step, other)) };
            check(form, &rule, len, seed, at_end, wild);
        }
    }
}

#[test]
fn shard_update_has_the_bits_of_the_whole_threaded_update() {
    let len = if std::env::var_os("MEMASCEND_TEST_SHORT").is_some() { 20_000 } else { (1 << 19) + 777 };
    let start = Wide::noise(len, 3, false);
    let gradient: Vec<Bf16> = start.first.iter().rev().map(|&g| Bf16::from_f32(g)).collect();
    let simd = Simd::available()[0];
    for form in forms() {
        let rule = if form.has_second { Rule::Adam(adam(true, 9)) } else { Rule::Momentum(momentum(9, false)) };
        let random = Random { key: 11, step: 9 };
        let whole = Memory::new(form, len, false);
        whole.begin(&start);
        let done = update(whole.state(), Floats::Bf16(&gradient), &rule, Position { random, first: 0 }, exec(4, simd));
        done.unwrap_or_else(|error| panic!("{error}"));
        let wide = whole.wide();
        // Each shard starts from its range of the same fp32 state. The test decodes the result of the shard to fp32,
        // and compares this result with the same range of `wide`. Decoding is exact.
        let mut ranges = vec![0..2048, 2048..10_240, 10_240..len.min(118 * 256)];
        if form.moment != Moment::Blocks {
            ranges.extend([7..263, 1999..9001]);
        }
        for range in ranges {
            let part = Memory::new(form, range.len(), true);
            let of = |all: &[f32]| all[range.clone()].to_vec();
            part.begin(&Wide { master: of(&start.master), first: of(&start.first), second: of(&start.second) });
            let place = Position { random, first: range.start as u64 };
            update(part.state(), Floats::Bf16(&gradient[range.clone()]), &rule, place, exec(1, simd))
                .unwrap_or_else(|error| panic!("{error}"));
            let found = part.wide();
            let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&found.master), bits(&wide.master[range.clone()]), "{form:?}");
            assert_eq!(bits(&found.first), bits(&wide.first[range.clone()]), "{form:?}");
            assert_eq!(bits(&found.second), bits(&wide.second[range.clone()]), "{form:?}");
        }
    }
}

#[test]
fn encode_keeps_the_codes_of_moments_that_are_not_given() {
    let memory = Memory::new(Form { weight: Weight::Single, moment: Moment::Blocks, has_second: true }, 700, false);
    let wide = Wide::noise(700, 5, false);
    memory.begin(&wide);
    // These codes would change if `encode` decoded the moments and encoded them again.
    memory.slice::<u8>(FIRST, 700).fill(3);
    let before = memory.bytes();
    let given = WideState { master: Some(&wide.master[..]), first: None, second: None };
    encode(given, memory.state(), exec(1, Simd::PORTABLE)).unwrap_or_else(|error| panic!("{error}"));
    assert!(memory.bytes() == before);
}

#[test]
fn bf16_second_moment_keeps_changes_below_its_precision() {
    let form = Form { weight: Weight::Single, moment: Moment::Bf16, has_second: true };
    let len = 4096;
    let memory = Memory::new(form, len, false);
    let ones = vec![1.0; len];
    memory.begin(&Wide { master: ones.clone(), first: vec![0.0; len], second: ones });
    let gradient = vec![0.0; len];
    for step in 1..=1000 {
        let place = Position { random: Random { key: 1, step }, first: 0 };
        update(memory.state(), Floats::F32(&gradient), &Rule::Adam(adam(true, step)), place, exec(1, Simd::PORTABLE))
            .unwrap_or_else(|error| panic!("{error}"));
    }
    let mean = memory.wide().second.iter().map(|&v| f64::from(v)).sum::<f64>() / len as f64;
    // The mean over 4,096 elements has a standard deviation of about 0.0004, so 0.004 is about ten standard deviations.
    assert!((mean - 0.999_f64.powi(1000)).abs() < 0.004, "{mean}");
}

#[test]
fn update_rejects_state_that_does_not_match_its_rule_or_gradient() {
    let of = |weight, moment, has_second| Memory::new(Form { weight, moment, has_second }, 8, false);
    let exec = exec(1, Simd::PORTABLE);
    let rule = Rule::Adam(adam(true, 1));
    let grad = [0.0; 8];
    let rejection = |state: Reduced<'_>, grad: &[f32], rule: &Rule, first| {
        let place = Position { random: Random::default(), first };
        update(state, Floats::F32(grad), rule, place, exec).map_or_else(|error| error.to_string(), |()| String::new())
    };
    let (two, one) = (of(Weight::Single, Moment::Bf16, true), of(Weight::Single, Moment::Bf16, false));
    assert!(rejection(one.state(), &grad, &rule, 0).contains("two moments"));
    assert!(rejection(two.state(), &grad, &Rule::Momentum(momentum(1, false)), 0).contains("one moment"));
    assert!(rejection(two.state(), &grad[1..], &rule, 0).contains("grad has 7"));
    let blocks = of(Weight::Single, Moment::Blocks, true);
    assert!(rejection(blocks.state(), &grad, &rule, 128).contains("multiple of 256"));
    assert!(rejection(two.state(), &grad, &Rule::Adam(adam(true, 0)), 0).contains("step"));
    let wrong = |of| rejection(one.state(), &grad, &Rule::Momentum(of), 0);
    assert!(wrong(Momentum { momentum: 0.0, ..momentum(1, true) }).contains("momentum is 0: pass a number above 0"));
    assert!(wrong(Momentum { dampening: 0.5, ..momentum(1, true) }).contains("dampening is 0.5: pass 0"));
    let compact = of(Weight::Compact, Moment::Bf16, true);
    let Reduced { weights, .. } = compact.state();
    let eight = of(Weight::Compact, Moment::Blocks, true);
    let Reduced { moments, .. } = eight.state();
    assert!(rejection(Reduced { weights, moments }, &grad, &rule, 0).contains("rounded_up"));
    assert!(rejection(two.state(), &grad, &rule, 256).is_empty());
}
