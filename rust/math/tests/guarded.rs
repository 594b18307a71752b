//! Tests `check`, `check_and_unscale`, `adam`, `adam_compact` and `widen` on every instruction set of this processor.
//!
//! The tested slices lie next to inaccessible pages, because a kernel must access no byte outside its slices. The
//! elements must have the same bits as in a computation of one element at a time. `adam_compact` is compared with
//! `adam`.

use std::num::NonZeroUsize;

use memascend_math::{
    AdamState, Bf16, CompactState, Element, Exec, F16, Floats, FloatsMut, Hyperparameters, Moments, Reduced, Simd,
    Weights, WideState, adam, adam_compact, check, check_and_unscale, decode, encode, widen,
};
use proptest::prelude::*;

mod guard;
use guard::Guarded;

/// Returns a small random generator. It generates megabytes of input, for which proptest would need too long.
fn noise(seed: u64) -> impl FnMut() -> u32 {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    }
}

/// Fills `out` with random values over the whole range of the type. With `wild`, some values are infinities and NaNs.
fn values<T: Element>(out: &mut [T], seed: u64, wild: bool) {
    let mut next = noise(seed);
    for value in out {
        let bits = next();
        let x = f32::from_bits(if wild || bits & 0x7F80_0000 != 0x7F80_0000 { bits } else { bits & 0x3FFF_FFFF });
        let rounded = T::from_f32(x);
        *value = if wild || rounded.to_f32().is_finite() { rounded } else { T::from_f32(0.5) };
    }
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

fn execs(threads: usize) -> Vec<Exec> {
    let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
    let exec = Exec::new(threads).unwrap_or_else(|error| panic!("{error}"));
    Simd::available().into_iter().map(|simd| exec.with_simd(simd)).collect()
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![0..100_usize, 2000..2100_usize, 4000..9000_usize]
}

/// Returns a length that is long enough for several threads and non-temporal stores. `MEMASCEND_TEST_SHORT`, which is
/// for slow runs under Valgrind, selects a length that is too short for both.
fn long() -> usize {
    if std::env::var_os("MEMASCEND_TEST_SHORT").is_some() { 70_000 } else { (1 << 20) + 4321 }
}

fn check_case<T: Element>(len: usize, seed: u64, at_end: bool, wild: bool, factor: f32, threads: usize) {
    let memory = Guarded::new(len * size_of::<T>());
    let mut results = Vec::new();
    for exec in execs(threads) {
        let data = memory.slice::<T>(len, at_end);
        values(data, seed, wild);
        let expected: Vec<T> = data
            .iter()
            .map(|x| if factor.to_bits() == 1.0_f32.to_bits() { *x } else { T::from_f32(x.to_f32() * factor) })
            .collect();
        let nonfinite = expected.iter().any(|x| !x.to_f32().is_finite());
        let squares: f64 = expected.iter().map(|x| f64::from(x.to_f32()).powi(2)).sum();
        let found = check_and_unscale(wrap_mut(data), factor, exec).unwrap_or_else(|error| panic!("{error}"));
        assert!(data.iter().zip(&expected).all(|(a, b)| same(a.to_f32(), b.to_f32())));
        assert_eq!(found.nonfinite, nonfinite);
        if squares.is_finite() {
            assert!(
                (found.squares.value() - squares).abs() <= 1e-6 * squares,
                "{} against {squares}",
                found.squares.value()
            );
        } else {
            assert!(!found.squares.value().is_finite());
        }
        let again = check(wrap(data), exec);
        assert!(again.squares.value().to_bits() == found.squares.value().to_bits() || again.squares.value().is_nan());
        results
            .push((found.nonfinite, if found.squares.value().is_nan() { 1 } else { found.squares.value().to_bits() }));
    }
    assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
}

fn adam_case<G: Element, O: Element>(
    len: usize,
    seed: u64,
    at_end: bool,
    wild: bool,
    group: Hyperparameters,
    threads: usize,
) {
    let scalars = group.scalars().unwrap_or_else(|error| panic!("{error}"));
    let floats = [0, 1, 2].map(|_| Guarded::new(len * 4));
    let (grads, outs) = (Guarded::new(len * size_of::<G>()), Guarded::new(len * size_of::<O>()));
    for exec in execs(threads) {
        let [master, exp_avg, exp_avg_sq] = floats.each_ref().map(|memory| memory.slice::<f32>(len, at_end));
        let (grad, out) = (grads.slice::<G>(len, at_end), outs.slice::<O>(len, at_end));
        values(master, seed, wild);
        values(exp_avg, seed + 1, wild);
        values(exp_avg_sq, seed + 2, wild);
        for v in exp_avg_sq.iter_mut() {
            *v = v.abs();
        }
        values(grad, seed + 3, wild);
        let before: Vec<_> = (0..len).map(|i| (master[i], grad[i].to_f32(), exp_avg[i], exp_avg_sq[i])).collect();
        let state = AdamState { master, exp_avg, exp_avg_sq };
        adam(state, wrap(grad), Some(wrap_mut(out)), &scalars, exec).unwrap_or_else(|error| panic!("{error}"));
        for (i, (p, g, m, v)) in before.into_iter().enumerate() {
            let p = p * scalars.decay;
            let g = g * scalars.grad_factor;
            let g = if scalars.l2 == 0.0 { g } else { p.mul_add(scalars.l2, g) };
            let m = scalars.first_weight.mul_add(g - m, if scalars.from_gradient { g } else { m });
            let v = (g * scalars.one_minus_beta2).mul_add(g, v * scalars.beta2);
            let p = p + (m * scalars.step_size) / (v.sqrt() / scalars.bias2_root + scalars.eps);
            assert!(same(master[i], p) && same(exp_avg[i], m) && same(exp_avg_sq[i], v), "{exec:?} {i}");
            assert!(same(out[i].to_f32(), O::from_f32(p).to_f32()), "{exec:?} {i}");
        }
    }
}

/// Returns a state whose master is split into `values` and `rest`.
fn reduced<'a>(
    values: &'a mut [Bf16],
    rest: &'a mut [u16],
    exp_avg: &'a mut [f32],
    exp_avg_sq: &'a mut [f32],
) -> Reduced<'a> {
    let weights = Weights::Compact { values, rest, rounded_up: None };
    Reduced { weights, moments: Moments::Single(exp_avg, Some(exp_avg_sq)) }
}

/// Splits a master into 16-bit halves, makes one step, and joins the halves. The result must equal the result of a step
/// on the whole master.
fn compact_case<G: Element>(len: usize, seed: u64, at_end: bool, wild: bool, group: Hyperparameters, threads: usize) {
    let scalars = group.scalars().unwrap_or_else(|error| panic!("{error}"));
    let floats = [0, 1, 2].map(|_| Guarded::new(len * 4));
    let halves = [0, 1].map(|_| Guarded::new(len * 2));
    let grads = Guarded::new(len * size_of::<G>());
    for exec in execs(threads) {
        let [master, exp_avg, exp_avg_sq] = floats.each_ref().map(|memory| memory.slice::<f32>(len, at_end));
        let [whole, rest] = halves.each_ref().map(|memory| memory.slice::<Bf16>(len, at_end));
        let grad = grads.slice::<G>(len, at_end);
        values(master, seed, wild);
        values(exp_avg, seed + 1, wild);
        values(exp_avg_sq, seed + 2, wild);
        for v in exp_avg_sq.iter_mut() {
            *v = v.abs();
        }
        values(grad, seed + 3, wild);
        let before: Vec<_> = (0..len).map(|i| (master[i], exp_avg[i], exp_avg_sq[i])).collect();
        // SAFETY: `Bf16` is a transparent `u16`, and only the new slice is used from here on.
        let rest = unsafe { std::slice::from_raw_parts_mut(rest.as_mut_ptr().cast::<u16>(), len) };
        let wide = WideState { master: Some(&*master), ..WideState::default() };
        encode(wide, reduced(whole, rest, exp_avg, exp_avg_sq), exec).unwrap_or_else(|error| panic!("{error}"));
        let state = CompactState { values: whole, rest, exp_avg, exp_avg_sq };
        adam_compact(state, wrap(grad), &scalars, exec).unwrap_or_else(|error| panic!("{error}"));
        let mut second = vec![0.0; len];
        let wide = WideState { master: Some(&mut *master), second: Some(&mut second[..]), ..WideState::default() };
        decode(reduced(whole, rest, exp_avg, exp_avg_sq), wide, exec).unwrap_or_else(|error| panic!("{error}"));
        let [mut p, mut m, mut v] = [0, 1, 2].map(|_| Vec::with_capacity(len));
        for (one, other, third) in before {
            p.push(one);
            m.push(other);
            v.push(third);
        }
        let mut out = vec![Bf16(0); len];
        let state = AdamState { master: &mut p, exp_avg: &mut m, exp_avg_sq: &mut v };
        adam(state, wrap(grad), Some(FloatsMut::Bf16(&mut out)), &scalars, exec)
            .unwrap_or_else(|error| panic!("{error}"));
        for i in 0..len {
            assert!(same(master[i], p[i]) && same(exp_avg[i], m[i]) && same(second[i], v[i]), "{exec:?} {i}");
            assert!(same(whole[i].to_f32(), out[i].to_f32()), "{exec:?} {i}");
        }
    }
}

fn widen_case<S: Element>(len: usize, seed: u64, at_end: bool, threads: usize) {
    let (sources, outs) = (Guarded::new(len * size_of::<S>()), Guarded::new(len * 4));
    for exec in execs(threads) {
        let (source, out) = (sources.slice::<S>(len, at_end), outs.slice::<f32>(len, at_end));
        values(source, seed, true);
        widen(wrap(source), out, exec).unwrap_or_else(|error| panic!("{error}"));
        assert!(source.iter().zip(&*out).all(|(s, o)| same(s.to_f32(), *o)));
    }
}

/// Returns the slice in the variant of `Floats` for its element type.
fn wrap<T: Element>(data: &[T]) -> Floats<'_> {
    let any: &dyn std::any::Any = &T::default();
    let (address, len) = (data.as_ptr(), data.len());
    if any.is::<f32>() {
        // SAFETY: `T` is `f32`.
        Floats::F32(unsafe { std::slice::from_raw_parts(address.cast(), len) })
    } else if any.is::<Bf16>() {
        // SAFETY: `T` is `Bf16`.
        Floats::Bf16(unsafe { std::slice::from_raw_parts(address.cast::<Bf16>(), len) })
    } else {
        // SAFETY: `T` is `F16`, because only three types implement `Element`.
        Floats::F16(unsafe { std::slice::from_raw_parts(address.cast::<F16>(), len) })
    }
}

fn wrap_mut<T: Element>(data: &mut [T]) -> FloatsMut<'_> {
    let any: &dyn std::any::Any = &T::default();
    let (address, len) = (data.as_mut_ptr(), data.len());
    if any.is::<f32>() {
        // SAFETY: `T` is `f32`.
        FloatsMut::F32(unsafe { std::slice::from_raw_parts_mut(address.cast(), len) })
    } else if any.is::<Bf16>() {
        // SAFETY: `T` is `Bf16`.
        FloatsMut::Bf16(unsafe { std::slice::from_raw_parts_mut(address.cast::<Bf16>(), len) })
    } else {
        // SAFETY: `T` is `F16`, because only three types implement `Element`.
        FloatsMut::F16(unsafe { std::slice::from_raw_parts_mut(address.cast::<F16>(), len) })
    }
}

fn group(decoupled: bool, beta1: f64, step: u64) -> Hyperparameters {
    let (lr, beta2, eps, weight_decay) = (1e-3, 0.999, 1e-8, 0.1);
    Hyperparameters { lr, beta1, beta2, eps, weight_decay, decoupled, step, grad_scale: 0.75, maximize: false, seed: 0 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn check_and_unscale_stays_in_bounds_and_finds_nonfinite_elements(
        len in lengths(), seed in any::<u64>(), at_end in any::<bool>(), wild in any::<bool>(),
        factor in prop_oneof![Just(1.0_f32), Just(0.0), -2.0..2.0_f32],
    ) {
        let seed = seed >> 8;
        check_case::<f32>(len, seed, at_end, wild, factor, 1);
        check_case::<Bf16>(len, seed, at_end, wild, factor, 1);
        check_case::<F16>(len, seed, at_end, wild, factor, 1);
    }

    #[test]
    fn adam_stays_in_bounds_and_equals_its_formula(
        len in lengths(), seed in any::<u64>(), at_end in any::<bool>(), wild in any::<bool>(),
        decoupled in any::<bool>(), beta1 in prop_oneof![Just(0.9), Just(0.3), Just(0.0)], step in 1..1_000_000_u64,
    ) {
        let (seed, group) = (seed >> 8, group(decoupled, beta1, step));
        adam_case::<Bf16, Bf16>(len, seed, at_end, wild, group, 1);
        adam_case::<F16, F16>(len, seed, at_end, wild, group, 1);
        adam_case::<f32, Bf16>(len, seed, at_end, wild, group, 1);
        compact_case::<Bf16>(len, seed, at_end, wild, group, 1);
        compact_case::<f32>(len, seed, at_end, wild, group, 1);
    }

    #[test]
    fn widening_changes_no_value(len in lengths(), seed in any::<u64>(), at_end in any::<bool>()) {
        let seed = seed >> 8;
        widen_case::<Bf16>(len, seed, at_end, 1);
        widen_case::<F16>(len, seed, at_end, 1);
        widen_case::<f32>(len, seed, at_end, 1);
    }
}

#[test]
fn kernels_on_long_slices_are_exact_on_several_threads() {
    let cases = if std::env::var_os("MEMASCEND_TEST_LONG").is_some() { 5 } else { 2 };
    for (threads, at_end) in [(1, true), (16, false), (2, false), (3, true), (16, true)].into_iter().take(cases) {
        check_case::<f32>(long(), 1, at_end, false, 0.5, threads);
        check_case::<Bf16>(long(), 2, at_end, false, 1.0, threads);
        adam_case::<Bf16, Bf16>(long(), 3, at_end, true, group(true, 0.9, 5), threads);
        compact_case::<Bf16>(long(), 3, at_end, true, group(true, 0.9, 5), threads);
        widen_case::<Bf16>(long(), 5, at_end, threads);
    }
}

#[test]
fn kernels_reject_different_lengths_and_write_nothing() {
    let exec = execs(1)[0];
    let scalars = group(true, 0.9, 1).scalars().unwrap_or_else(|error| panic!("{error}"));
    let (mut p, mut m, mut v, grad) = (vec![1.0_f32; 8], vec![1.0; 8], vec![1.0; 8], vec![1.0_f32; 7]);
    let state = AdamState { master: &mut p, exp_avg: &mut m, exp_avg_sq: &mut v };
    let refused = adam(state, Floats::F32(&grad), None, &scalars, exec);
    assert_eq!(
        refused.map_err(|e| e.to_string()),
        Err("grad has 7 elements but needs 8 to match master: pass slices that match".into())
    );
    assert!(widen(Floats::F32(&grad), &mut p, exec).is_err());
    assert!(check_and_unscale(FloatsMut::F32(&mut p), f32::NAN, exec).is_err());
    assert!([p, m, v].iter().flatten().all(|x| x.to_bits() == 1.0_f32.to_bits()));
}
