//! Splits fp32 master weights into a bfloat16 parameter and 16 remaining bits, and joins them.
//!
//! [Note: split masters] The *value* of a master with the bits `x` is its upper half, rounded to nearest even. The
//! forward computes with the value. The *rest* is the lower half, `x & 0xFFFF`. To join value and rest, `join_master`
//! must also know whether the rounding went up. The rest shows this, except for a tie (0x8000). So the sign bit of the
//! second moment, which is never negative, stores for every element whether the rounding went up (1) or not (0). The
//! master then is
//!
//! ```text
//! master = ((value - went up) << 16) | rest
//! ```
//!
//! The formula also holds for zeros, denormals, infinities, and masters that round to an infinity. A NaN is not
//! rounded: its value is the upper half with the quiet bit set, and `went up` is 0. So a quiet NaN keeps its bits, and
//! a signalling NaN becomes quiet, as after any arithmetic.

use crate::{
    Bf16, Element, Error, Exec, Floats, Result, Scalars,
    adam::one,
    element::for_type,
    exec::Work,
    simd::{Kernel, Simd},
};

/// `Exec::run` splits work at multiples of this many elements. For every type, this many elements fill whole cache
/// lines.
const GRAIN: usize = 1024;

const SIGN: u32 = 0x8000_0000;

/// The state of a bfloat16 parameter with a split master, updated in place. See [Note: split masters] in the source.
#[derive(Debug)]
pub struct CompactState<'a> {
    /// The parameter: the upper halves of the master, rounded.
    pub values: &'a mut [Bf16],
    /// The lower halves of the master.
    pub rest: &'a mut [u16],
    /// The first moment.
    pub exp_avg: &'a mut [f32],
    /// The second moment. The sign bit of an element is set if the rounding of the element's master went up.
    pub exp_avg_sq: &'a mut [f32],
}

/// Updates a split master by one step of [`adam`](crate::adam). The result has the same bits as for a whole master.
pub fn adam_compact(state: CompactState<'_>, grad: Floats<'_>, scalars: &Scalars, exec: Exec) -> Result<()> {
    for_type!(Floats, grad, grad => update(state, grad, scalars, exec))
}

fn update<G: Element>(state: CompactState<'_>, grad: &[G], scalars: &Scalars, exec: Exec) -> Result<()> {
    let lengths = [
        ("grad", grad.len()),
        ("rest", state.rest.len()),
        ("exp_avg", state.exp_avg.len()),
        ("exp_avg_sq", state.exp_avg_sq.len()),
    ];
    let other_len = state.values.len();
    if let Some((name, len)) = lengths.into_iter().find(|(_, len)| *len != other_len) {
        return Err(Error::Length { name, len, other: "values", other_len });
    }
    exec.run(CompactKernel { state, grad, scalars }, GRAIN, Simd::run);
    Ok(())
}

/// Splits `master` into value and rest. Also returns the second moment, with the sign that `join_master` needs.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "keeps the lower half")]
pub(crate) fn split_master(master: f32, exp_avg_sq: f32) -> (Bf16, u16, f32) {
    let bits = master.to_bits();
    let value = Bf16::from_f32(master);
    // Rounding up changes the last bit of the upper half. Setting the quiet bit of a NaN does not change this bit.
    let went_up = (u32::from(value.0) ^ (bits >> 16)) << 31;
    (value, bits as u16, f32::from_bits(exp_avg_sq.to_bits() & !SIGN | went_up))
}

/// Joins a master from value and rest. Also returns the second moment without its sign.
#[inline(always)]
pub(crate) fn join_master(value: Bf16, rest: u16, exp_avg_sq: f32) -> (f32, f32) {
    let bits = exp_avg_sq.to_bits();
    let upper = u32::from(value.0).wrapping_sub(bits >> 31) << 16;
    (f32::from_bits(upper | u32::from(rest)), f32::from_bits(bits & !SIGN))
}

struct CompactKernel<'a, G> {
    state: CompactState<'a>,
    grad: &'a [G],
    scalars: &'a Scalars,
}

impl<G: Element> Work for CompactKernel<'_, G> {
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

impl<G: Element> Kernel for CompactKernel<'_, G> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let CompactState { values, rest, exp_avg, exp_avg_sq } = self.state;
        updated(values, rest, self.grad, exp_avg, exp_avg_sq, self.scalars);
    }
}

/// Updates each element. The slices are arguments, not fields: the compiler assumes that arguments do not overlap, but
/// assumes nothing about fields.
#[inline(always)]
fn updated<G: Element>(
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
    // Copies the scalars: if `s` stayed a reference, the compiler would reload each scalar after every store.
    let s = *s;
    let l2 = s.l2 != 0.0;
    for i in 0..len {
        let (p, v) = join_master(values[i], rest[i], exp_avg_sq[i]);
        let (p, m, v) = one(p, grad[i].to_f32(), exp_avg[i], v, &s, l2);
        exp_avg[i] = m;
        (values[i], rest[i], exp_avg_sq[i]) = split_master(p, v);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Second moments of every kind, with NaNs of either sign.
    const MOMENTS: [u32; 8] = [0, 1, 0x007F_FFFF, 0x3F80_0000, 0x7F7F_FFFF, 0x7F80_0000, 0x7FC0_0000, 0xFFC0_1234];
    const QUIET: u32 = 0x0040_0000;

    #[test]
    fn split_and_joined_master_keeps_its_bits() {
        // With `MEMASCEND_TEST_LONG`, tests all upper halves. Otherwise tests every 61st upper half. Always tests the
        // upper halves of zeros, denormals, the largest numbers, infinities and NaNs.
        let stride = if std::env::var_os("MEMASCEND_TEST_LONG").is_some() { 1 } else { 61 };
        let edges = [0, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7FBF, 0x7FC0, 0x7FFF].map(|upper| [upper, upper | 0x8000]);
        for (upper, moment) in (0..=0xFFFF_u32).step_by(stride).chain(edges.concat()).zip(MOMENTS.into_iter().cycle()) {
            // Combining the differences without a branch is several times faster than a branch for each number.
            let wrong = (0..=0xFFFF).fold(0, |wrong, lower| {
                let bits = upper << 16 | lower;
                let (value, rest, signed) = split_master(f32::from_bits(bits), f32::from_bits(moment));
                let (master, back) = join_master(value, rest, signed);
                let wanted = if bits & !SIGN > 0x7F80_0000 { bits | QUIET } else { bits };
                let rounded = Bf16::from_f32(f32::from_bits(bits));
                wrong | master.to_bits() ^ wanted | u32::from(value.0 ^ rounded.0) | back.to_bits() ^ moment & !SIGN
            });
            assert_eq!(wrong, 0, "below {upper:04x}: bits that differ");
        }
    }
}
