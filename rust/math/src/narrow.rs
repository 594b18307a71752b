//! Computes Adam on compact bfloat16 parameters with bfloat16 moments. The kernel makes one pass, without the fp32
//! blocks of `reduced.rs`, and gives the same bits as `reduced.rs`.

use crate::{
    Bf16, Element, Floats, Scalars,
    adam::one,
    compact::{join_master, split_master},
    element::for_type,
    philox::BLOCK,
    stochastic::Stochastic,
};

/// The elements of a block; the last block may be shorter.
pub(crate) struct Narrow<'a> {
    pub(crate) values: &'a mut [Bf16],
    pub(crate) rest: &'a mut [u16],
    pub(crate) first: &'a mut [Bf16],
    pub(crate) second: &'a mut [Bf16],
}

impl Narrow<'_> {
    #[inline(always)]
    pub(crate) fn update(self, grad: Floats<'_>, drawn: &[u16; BLOCK], s: &Scalars) {
        let Self { values, rest, first, second } = self;
        for_type!(Floats, grad, grad => updated(values, rest, first, second, grad, drawn, s));
    }
}

/// Updates each element. The slices are arguments, not fields: the compiler assumes that arguments do not overlap, but
/// assumes nothing about fields.
#[inline(always)]
fn updated<G: Element>(
    values: &mut [Bf16],
    rest: &mut [u16],
    first: &mut [Bf16],
    second: &mut [Bf16],
    grad: &[G],
    drawn: &[u16; BLOCK],
    s: &Scalars,
) {
    let len = values.len();
    let (rest, first, second) = (&mut rest[..len], &mut first[..len], &mut second[..len]);
    let (grad, drawn) = (&grad[..len], &drawn[..len]);
    // Copies the scalars: if `s` stayed a reference, the compiler would reload each scalar after every store.
    let s = *s;
    let l2 = s.l2 != 0.0;
    for i in 0..len {
        let (p, v) = join_master(values[i], rest[i], second[i].to_f32());
        let (p, m, v) = one(p, grad[i].to_f32(), first[i].to_f32(), v, &s, l2);
        let signed;
        (values[i], rest[i], signed) = split_master(p, v);
        first[i] = Bf16::from_f32(m);
        second[i] = Bf16::rounded(signed, drawn[i]);
    }
}
