//! Joins and splits fp32 masters whose upper half is the bfloat16 parameter.
//!
//! Of a master with the bits `x`, the *value* is its upper half rounded to nearest even, which a forward pass computes
//! with, and the *rest* is the lower half, `x & 0xFFFF`. What is then missing is whether the rounding went up: the rest
//! alone tells it but where it is a tie, 0x8000. That one bit is kept in the sign of the second moment, which is never
//! negative; for every element, not only for ties, so that
//!
//! ```text
//! master = ((value - went up) << 16) | rest
//! ```
//!
//! holds of zeros, denormals, infinities and of what rounds to an infinity alike. A NaN is not rounded but made quiet:
//! its value is the upper half with the quiet bit, which the subtraction of nothing leaves; so a quiet NaN keeps its bits
//! and a signalling one becomes the quiet one that any arithmetic would make of it.

use crate::{
    Bf16, Element, Error, Exec, Floats, Result, Scalars,
    adam::one,
    exec::Work,
    fused::Fused,
    simd::{Kernel, Simd},
};

/// Where parts are cut: a multiple of the lines of every type.
const GRAIN: usize = 1024;

const SIGN: u32 = 0x8000_0000;

/// The state of a bfloat16 parameter whose master is split, updated in place.
#[derive(Debug)]
pub struct CompactState<'a> {
    /// The parameter: the upper halves of the master, rounded.
    pub values: &'a mut [Bf16],
    /// The lower halves of the master.
    pub rest: &'a mut [u16],
    /// The first moment.
    pub exp_avg: &'a mut [f32],
    /// The second moment; its signs say where the rounding went up.
    pub exp_avg_sq: &'a mut [f32],
}

/// One step of [`adam`](crate::adam) on a master that is split: the same bits, also of what is left of it afterwards.
pub fn adam_compact(state: CompactState<'_>, grad: Floats<'_>, scalars: &Scalars, exec: Exec) -> Result<()> {
    match grad {
        Floats::F32(grad) => update(state, grad, scalars, exec),
        Floats::Bf16(grad) => update(state, grad, scalars, exec),
        Floats::F16(grad) => update(state, grad, scalars, exec),
    }
}

/// Splits `master` into `values` and `rest`. The signs of `exp_avg_sq` are set; its magnitudes stay.
pub fn split_master(
    master: &[f32],
    values: &mut [Bf16],
    rest: &mut [u16],
    exp_avg_sq: &mut [f32],
    exec: Exec,
) -> Result<()> {
    let len = master.len();
    agree(("master", len), &[("values", values.len()), ("rest", rest.len()), ("exp_avg_sq", exp_avg_sq.len())])?;
    exec.run(Split { master, values, rest, exp_avg_sq }, GRAIN, Simd::run);
    Ok(())
}

/// Writes the `master` that `values`, `rest` and the signs of `exp_avg_sq` are, and clears these signs.
pub fn join_master(
    values: &[Bf16],
    rest: &[u16],
    exp_avg_sq: &mut [f32],
    master: &mut [f32],
    exec: Exec,
) -> Result<()> {
    let len = master.len();
    agree(("master", len), &[("values", values.len()), ("rest", rest.len()), ("exp_avg_sq", exp_avg_sq.len())])?;
    exec.run(Join { values, rest, exp_avg_sq, master }, GRAIN, Simd::run);
    Ok(())
}

fn update<G: Element>(state: CompactState<'_>, grad: &[G], scalars: &Scalars, exec: Exec) -> Result<()> {
    let lengths = [
        ("grad", grad.len()),
        ("rest", state.rest.len()),
        ("exp_avg", state.exp_avg.len()),
        ("exp_avg_sq", state.exp_avg_sq.len()),
    ];
    agree(("values", state.values.len()), &lengths)?;
    exec.run(Update { state, grad, scalars }, GRAIN, Simd::run);
    Ok(())
}

fn agree((other, other_len): (&'static str, usize), lengths: &[(&'static str, usize)]) -> Result<()> {
    match lengths.iter().find(|(_, len)| *len != other_len) {
        None => Ok(()),
        Some(&(name, len)) => Err(Error::Length { name, len, other, other_len }),
    }
}

/// Value, rest, and the second moment with its sign.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
pub(crate) fn taken_apart(master: f32, exp_avg_sq: f32) -> (Bf16, u16, f32) {
    let bits = master.to_bits();
    let value = Bf16::from_f32(master);
    // Rounding up by one changes the last bit; making a NaN quiet does not.
    let went_up = (u32::from(value.0) ^ (bits >> 16)) << 31;
    (value, bits as u16, f32::from_bits(exp_avg_sq.to_bits() & !SIGN | went_up))
}

/// Master, and the second moment without its sign.
#[inline(always)]
pub(crate) fn put_together(value: Bf16, rest: u16, exp_avg_sq: f32) -> (f32, f32) {
    let bits = exp_avg_sq.to_bits();
    let upper = u32::from(value.0).wrapping_sub(bits >> 31) << 16;
    (f32::from_bits(upper | u32::from(rest)), f32::from_bits(bits & !SIGN))
}

struct Update<'a, G> {
    state: CompactState<'a>,
    grad: &'a [G],
    scalars: &'a Scalars,
}

impl<G: Element> Work for Update<'_, G> {
    fn len(&self) -> usize {
        self.grad.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (values, values_after) = self.state.values.split_at_mut(middle);
        let (rest, rest_after) = self.state.rest.split_at_mut(middle);
        let (exp_avg, exp_avg_after) = self.state.exp_avg.split_at_mut(middle);
        let (exp_avg_sq, exp_avg_sq_after) = self.state.exp_avg_sq.split_at_mut(middle);
        let (grad, grad_after) = self.grad.split_at(middle);
        let after = CompactState {
            values: values_after,
            rest: rest_after,
            exp_avg: exp_avg_after,
            exp_avg_sq: exp_avg_sq_after,
        };
        (
            Self { state: CompactState { values, rest, exp_avg, exp_avg_sq }, grad, ..self },
            Self { state: after, grad: grad_after, ..self },
        )
    }
}

impl<G: Element> Kernel for Update<'_, G> {
    type Output = ();

    #[inline(always)]
    fn run<F: Fused>(self) {
        let CompactState { values, rest, exp_avg, exp_avg_sq } = self.state;
        updated::<F, G>(values, rest, self.grad, exp_avg, exp_avg_sq, self.scalars);
    }
}

// Slices are arguments of the loops, and not fields, because only arguments are known not to overlap.

#[inline(always)]
fn updated<F: Fused, G: Element>(
    values: &mut [Bf16],
    rest: &mut [u16],
    grad: &[G],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    s: &Scalars,
) {
    let len = values.len();
    let (rest, grad) = (&mut rest[..len], &grad[..len]);
    let (exp_avg, exp_avg_sq) = (&mut exp_avg[..len], &mut exp_avg_sq[..len]);
    // A copy: behind the reference each could change with every store.
    let s = *s;
    let l2 = s.l2 != 0.0;
    for i in 0..len {
        let (p, v) = put_together(values[i], rest[i], exp_avg_sq[i]);
        let (p, m, v) = one::<F>(p, grad[i].to_f32(), exp_avg[i], v, &s, l2);
        exp_avg[i] = m;
        (values[i], rest[i], exp_avg_sq[i]) = taken_apart(p, v);
    }
}

struct Split<'a> {
    master: &'a [f32],
    values: &'a mut [Bf16],
    rest: &'a mut [u16],
    exp_avg_sq: &'a mut [f32],
}

impl Work for Split<'_> {
    fn len(&self) -> usize {
        self.master.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (master, master_after) = self.master.split_at(middle);
        let (values, values_after) = self.values.split_at_mut(middle);
        let (rest, rest_after) = self.rest.split_at_mut(middle);
        let (exp_avg_sq, exp_avg_sq_after) = self.exp_avg_sq.split_at_mut(middle);
        (
            Self { master, values, rest, exp_avg_sq },
            Self { master: master_after, values: values_after, rest: rest_after, exp_avg_sq: exp_avg_sq_after },
        )
    }
}

impl Kernel for Split<'_> {
    type Output = ();

    #[inline(always)]
    fn run<F: Fused>(self) {
        all_apart(self.master, self.values, self.rest, self.exp_avg_sq);
    }
}

#[inline(always)]
fn all_apart(master: &[f32], values: &mut [Bf16], rest: &mut [u16], exp_avg_sq: &mut [f32]) {
    let len = master.len();
    let (values, rest, exp_avg_sq) = (&mut values[..len], &mut rest[..len], &mut exp_avg_sq[..len]);
    for i in 0..len {
        (values[i], rest[i], exp_avg_sq[i]) = taken_apart(master[i], exp_avg_sq[i]);
    }
}

struct Join<'a> {
    values: &'a [Bf16],
    rest: &'a [u16],
    exp_avg_sq: &'a mut [f32],
    master: &'a mut [f32],
}

impl Work for Join<'_> {
    fn len(&self) -> usize {
        self.values.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (values, values_after) = self.values.split_at(middle);
        let (rest, rest_after) = self.rest.split_at(middle);
        let (exp_avg_sq, exp_avg_sq_after) = self.exp_avg_sq.split_at_mut(middle);
        let (master, master_after) = self.master.split_at_mut(middle);
        (
            Self { values, rest, exp_avg_sq, master },
            Self { values: values_after, rest: rest_after, exp_avg_sq: exp_avg_sq_after, master: master_after },
        )
    }
}

impl Kernel for Join<'_> {
    type Output = ();

    #[inline(always)]
    fn run<F: Fused>(self) {
        all_together(self.values, self.rest, self.exp_avg_sq, self.master);
    }
}

#[inline(always)]
fn all_together(values: &[Bf16], rest: &[u16], exp_avg_sq: &mut [f32], master: &mut [f32]) {
    let len = values.len();
    let (rest, exp_avg_sq, master) = (&rest[..len], &mut exp_avg_sq[..len], &mut master[..len]);
    for i in 0..len {
        (master[i], exp_avg_sq[i]) = put_together(values[i], rest[i], exp_avg_sq[i]);
    }
}
