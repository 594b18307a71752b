//! Adds a gradient to an fp32 total in one pass.

use crate::{
    Element, Error, Exec, Floats, Result,
    exec::Work,
    fused::Fused,
    simd::{Kernel, Simd},
};

/// Where parts are cut: a multiple of the lines of every type.
const GRAIN: usize = 1024;

/// `total += grad`, in fp32.
pub fn accumulate(total: &mut [f32], grad: Floats<'_>, exec: Exec) -> Result<()> {
    match grad {
        Floats::F32(grad) => added(total, grad, exec),
        Floats::Bf16(grad) => added(total, grad, exec),
        Floats::F16(grad) => added(total, grad, exec),
    }
}

fn added<G: Element>(total: &mut [f32], grad: &[G], exec: Exec) -> Result<()> {
    if grad.len() != total.len() {
        return Err(Error::Length { name: "grad", len: grad.len(), other: "total", other_len: total.len() });
    }
    exec.run(Sum { total, grad }, GRAIN, Simd::run);
    Ok(())
}

struct Sum<'a, G> {
    total: &'a mut [f32],
    grad: &'a [G],
}

impl<G: Element> Work for Sum<'_, G> {
    fn len(&self) -> usize {
        self.grad.len()
    }

    fn split_at(self, middle: usize) -> (Self, Self) {
        let (total, total_after) = self.total.split_at_mut(middle);
        let (grad, grad_after) = self.grad.split_at(middle);
        (Self { total, grad }, Self { total: total_after, grad: grad_after })
    }
}

impl<G: Element> Kernel for Sum<'_, G> {
    type Output = ();

    #[inline(always)]
    fn run<F: Fused>(self) {
        elements(self.total, self.grad);
    }
}

#[inline(always)]
fn elements<G: Element>(total: &mut [f32], grad: &[G]) {
    for (total, value) in total.iter_mut().zip(grad) {
        *total += value.to_f32();
    }
}
