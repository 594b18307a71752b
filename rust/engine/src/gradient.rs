//! Gradients: memory that the engine holds on to until it has used it.

use memascend_math::{Bf16, F16, Floats};
use memascend_store::{Buffer, Dtype};

use crate::{Error, Result};

/// A parameter's gradient, contiguous in the parameter's own order.
pub struct Gradient {
    memory: Box<dyn Buffer>,
    dtype: Dtype,
}

impl Gradient {
    /// A gradient of `dtype` that lies in `memory`, aligned for it.
    pub fn new(memory: Box<dyn Buffer>, dtype: Dtype) -> Result<Self> {
        if !matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16) {
            return Err(Error::Invalid(format!(
                "a gradient of {}: float32, bfloat16 and float16 have an update",
                dtype.name()
            )));
        }
        let element = usize::try_from(dtype.bytes()).unwrap_or(usize::MAX);
        if !memory.is_empty()
            && (!(memory.as_ptr().as_ptr() as usize).is_multiple_of(element) || !memory.len().is_multiple_of(element))
        {
            return Err(Error::Invalid(format!("the gradient's memory is not aligned for {}", dtype.name())));
        }
        Ok(Self { memory, dtype })
    }

    /// Bytes of it.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.memory.len()
    }

    pub(crate) fn elements(&self) -> u64 {
        self.nbytes() as u64 / self.dtype.bytes()
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// `nbytes` from byte `start` on, which lie inside.
    pub(crate) fn bytes(&self, start: usize, nbytes: usize) -> &[u8] {
        assert!(start + nbytes <= self.nbytes(), "bytes past the end of a gradient");
        // SAFETY: inside the memory, which is mapped while it is held; nobody writes to a gradient that was handed over.
        unsafe { elements(self.memory.as_ptr().as_ptr(), start, nbytes) }
    }

    /// `count` elements from `start` on, which lie inside.
    pub(crate) fn part(&self, start: usize, count: usize) -> Floats<'_> {
        floats(&*self.memory, self.dtype, start, count)
    }
}

/// `count` elements from `start` on of memory that is aligned for its dtype, one of the three that kernels know.
pub(crate) fn floats(memory: &dyn Buffer, dtype: Dtype, start: usize, count: usize) -> Floats<'_> {
    assert!((start + count) as u64 * dtype.bytes() <= memory.len() as u64, "elements past the end of a tensor");
    let memory = memory.as_ptr().as_ptr();
    match dtype {
        // SAFETY: inside the memory, which is mapped while it is held and aligned; nobody writes to a tensor that was
        // handed over.
        Dtype::F32 => Floats::F32(unsafe { elements(memory, start, count) }),
        // SAFETY: as above.
        Dtype::Bf16 => Floats::Bf16(unsafe { elements::<Bf16>(memory, start, count) }),
        // SAFETY: as above.
        _ => Floats::F16(unsafe { elements::<F16>(memory, start, count) }),
    }
}

/// # Safety
/// `memory` holds at least `start + count` elements, aligned, that nobody writes to while the slice lives.
unsafe fn elements<'a, T>(memory: *const u8, start: usize, count: usize) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller's.
    let first = unsafe { memory.cast::<T>().add(start) };
    // SAFETY: the caller's.
    unsafe { std::slice::from_raw_parts(first, count) }
}
