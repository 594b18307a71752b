//! Computes one step of `AdamW` or `Adam` on fp32 state. The gradient and the output may have 16 bits, and the output
//! is optional.
//!
//! The kernel computes in the same order as torch's fused CPU kernel and gives the same bits, with one exception. Torch
//! rounds the second moment of the last elements of each thread's share differently. This kernel computes all elements
//! by one formula.

use crate::{
    Element, Error, Exec, Floats, FloatsMut, Result, STREAM_ELEMENTS_MIN, Scalars,
    element::for_type,
    exec::Work,
    simd::{Kernel, Simd},
    stream::{self, Fill},
};

/// The version of this arithmetic. Calls with the same version, state, gradient and scalars give the same bits.
pub const ADAM_ARITHMETIC: u32 = 1;

/// `Exec::run` splits work at multiples of this many elements. For every type, this many elements fill whole cache
/// lines.
const GRAIN: usize = 1024;

/// The fp32 state of a parameter, updated in place.
#[derive(Debug)]
pub struct AdamState<'a> {
    /// The fp32 master weights.
    pub master: &'a mut [f32],
    /// The first moment.
    pub exp_avg: &'a mut [f32],
    /// The second moment.
    pub exp_avg_sq: &'a mut [f32],
}

/// Updates `state` with `grad`. If `out` is given, writes the updated parameter to it, rounded to the type of `out`.
pub fn adam(
    state: AdamState<'_>,
    grad: Floats<'_>,
    out: Option<FloatsMut<'_>>,
    scalars: &Scalars,
    exec: Exec,
) -> Result<()> {
    for_type!(Floats, grad, grad => with_grad(state, grad, out, scalars, exec))
}

fn with_grad<G: Element>(
    state: AdamState<'_>,
    grad: &[G],
    out: Option<FloatsMut<'_>>,
    scalars: &Scalars,
    exec: Exec,
) -> Result<()> {
    match out {
        None => update::<G, f32>(state, grad, None, scalars, exec),
        Some(out) => for_type!(FloatsMut, out, out => update(state, grad, Some(out), scalars, exec)),
    }
}

fn update<G: Element, O: Element>(
    state: AdamState<'_>,
    grad: &[G],
    out: Option<&mut [O]>,
    scalars: &Scalars,
    exec: Exec,
) -> Result<()> {
    let len = state.master.len();
    let out_len = out.as_ref().map_or(len, |out| out.len());
    let lengths = [
        ("grad", grad.len()),
        ("exp_avg", state.exp_avg.len()),
        ("exp_avg_sq", state.exp_avg_sq.len()),
        ("out", out_len),
    ];
    for (name, other) in lengths {
        if other != len {
            return Err(Error::Length { name, len: other, other: "master", other_len: len });
        }
    }
    let streaming = len >= STREAM_ELEMENTS_MIN;
    exec.run(AdamKernel { state, grad, out, scalars, streaming }, GRAIN, Simd::run);
    Ok(())
}

struct AdamKernel<'a, G, O> {
    state: AdamState<'a>,
    grad: &'a [G],
    out: Option<&'a mut [O]>,
    scalars: &'a Scalars,
    streaming: bool,
}

impl<G: Element, O: Element> Work for AdamKernel<'_, G, O> {
    fn len(&self) -> usize {
        self.grad.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (master, master_after) = self.state.master.split_at_mut(middle);
        let (exp_avg, exp_avg_after) = self.state.exp_avg.split_at_mut(middle);
        let (exp_avg_sq, exp_avg_sq_after) = self.state.exp_avg_sq.split_at_mut(middle);
        let (grad, grad_after) = self.grad.split_at(middle);
        let (out, out_after) = self.out.map(|out| out.split_at_mut(middle)).unzip();
        let after = AdamState { master: master_after, exp_avg: exp_avg_after, exp_avg_sq: exp_avg_sq_after };
        (
            Self { state: AdamState { master, exp_avg, exp_avg_sq }, grad, out, ..self },
            Self { state: after, grad: grad_after, out: out_after, ..self },
        )
    }
}

impl<G: Element, O: Element> Kernel for AdamKernel<'_, G, O> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        match self.out {
            None => {
                let AdamState { master, exp_avg, exp_avg_sq } = self.state;
                elements::<G, O, false>(master, self.grad, exp_avg, exp_avg_sq, &mut [], self.scalars);
            }
            Some(out) => {
                let inputs = Inputs { state: self.state, grad: self.grad, scalars: self.scalars };
                stream::store(out, self.streaming, inputs);
            }
        }
    }
}

struct Inputs<'a, G> {
    state: AdamState<'a>,
    grad: &'a [G],
    scalars: &'a Scalars,
}

impl<G: Element, O: Element> Fill<O> for Inputs<'_, G> {
    #[inline(always)]
    fn fill(&mut self, start: usize, out: &mut [O]) {
        let here = start..start + out.len();
        let AdamState { master, exp_avg, exp_avg_sq } = &mut self.state;
        let (p, g) = (&mut master[here.clone()], &self.grad[here.clone()]);
        let (m, v) = (&mut exp_avg[here.clone()], &mut exp_avg_sq[here]);
        elements::<G, O, true>(p, g, m, v, out, self.scalars);
    }
}

/// Updates each element. The slices are arguments, not fields: the compiler assumes that arguments do not overlap, but
/// assumes nothing about fields.
#[inline(always)]
fn elements<G: Element, O: Element, const OUT: bool>(
    master: &mut [f32],
    grad: &[G],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    out: &mut [O],
    s: &Scalars,
) {
    let len = master.len();
    let (grad, exp_avg, exp_avg_sq) = (&grad[..len], &mut exp_avg[..len], &mut exp_avg_sq[..len]);
    let out = if OUT { &mut out[..len] } else { out };
    // Copies the scalars: if `s` stayed a reference, the compiler would reload each scalar after every store.
    let s = *s;
    let l2 = s.l2 != 0.0;
    for i in 0..len {
        let (p, m, v) = one(master[i], grad[i].to_f32(), exp_avg[i], exp_avg_sq[i], &s, l2);
        master[i] = p;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        if OUT {
            out[i] = O::from_f32(p);
        }
    }
}

/// Returns the updated (parameter, first moment, second moment) of one element. `l2` must be `s.l2 != 0.0`.
#[inline(always)]
pub(crate) fn one(p: f32, g: f32, m: f32, v: f32, s: &Scalars, l2: bool) -> (f32, f32, f32) {
    let p = p * s.decay;
    let g = g * s.grad_factor;
    // Without L2 decay, skips the addition: an infinite parameter times zero would be a NaN.
    let g = if l2 { p.mul_add(s.l2, g) } else { g };
    let m = s.first_weight.mul_add(g - m, if s.from_gradient { g } else { m });
    let v = (g * s.one_minus_beta2).mul_add(g, v * s.beta2);
    let denominator = v.sqrt() / s.bias2_root + s.eps;
    (p + (m * s.step_size) / denominator, m, v)
}
