//! Defines gradients. A gradient is either host memory that a job holds, or a source that lends one [`Window`] of the
//! gradient after the other.
//!
//! [Note: handed-over memory] A caller that gives the engine a [`Buffer`] must not write to the memory of the buffer
//! until the engine drops the buffer. So every thread of the engine may read this memory without a lock.

use std::{cell::Cell, ptr::NonNull, sync::Arc};

use memascend_math::{Bf16, F16, Floats};
use memascend_store::{Buffer, Dtype, Store};

use crate::{Cause, Error, Result};

/// The gradient of a parameter. Its elements are contiguous, in the order of the parameter's elements.
pub struct Gradient {
    memory: Memory,
    dtype: Dtype,
}

enum Memory {
    Here(Arc<Host>),
    /// The gradient is outside host memory, for example on a GPU. `window` is the range that `source` lent last.
    Away {
        source: Box<Source>,
        nbytes: usize,
        window: Cell<Option<Window>>,
    },
}

/// A gradient in host memory. Several threads may read it.
pub(crate) struct Host(Box<dyn Buffer>);

// SAFETY: nothing writes to the memory ([Note: handed-over memory]), so any thread may read it.
unsafe impl Sync for Host {}

impl Host {
    pub(crate) fn new(memory: Box<dyn Buffer>) -> Arc<Self> {
        Arc::new(Self(memory))
    }
}

impl std::ops::Deref for Host {
    type Target = dyn Buffer;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

/// A function that lends a gradient which the engine cannot read directly, for example a gradient on a GPU.
/// `source(start, nbytes)` returns a window of host memory with `nbytes` bytes of the gradient, beginning with byte
/// `start`. The window may have more than `nbytes` bytes of the gradient, if lending more bytes costs nothing. The
/// window must stay unchanged until the engine calls a source again, even the source of another gradient. The engine
/// calls all sources on one thread, one after the other. A source must not wait for the engine.
pub type Source = dyn Fn(usize, usize) -> std::result::Result<Window, Cause> + Send;

/// A range of a gradient's bytes in host memory.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    address: NonNull<u8>,
    start: usize,
    nbytes: usize,
}

// SAFETY: only the thread of the engine reads the window, between two calls of the source.
unsafe impl Send for Window {}

impl Window {
    /// Describes `nbytes` bytes of a gradient, beginning with byte `start` of the gradient. `address` points to these
    /// bytes.
    ///
    /// # Safety
    /// `address` must be aligned for the dtype of the gradient, and `start` must be a multiple of the size of an
    /// element. Until the engine calls a source again, or until all jobs of this source have ended, `address` must be
    /// valid for reads of `nbytes` bytes, and nothing may write to this memory.
    #[must_use]
    pub unsafe fn new(address: NonNull<u8>, start: usize, nbytes: usize) -> Self {
        Self { address, start, nbytes }
    }
}

impl Gradient {
    /// Creates a gradient of `dtype` in `memory`. Returns an error if a gradient cannot have this dtype, or if `memory`
    /// is not aligned for `dtype` or does not hold a whole number of elements.
    pub fn new(memory: Box<dyn Buffer>, dtype: Dtype) -> Result<Self> {
        let element = require_float(dtype)?;
        if !memory.is_empty()
            && (!memory.as_ptr().addr().is_multiple_of(element) || !memory.len().is_multiple_of(element))
        {
            return Err(Error::Invalid(format!(
                "the gradient's memory does not hold whole, aligned elements of {}: give aligned memory with a whole \
                 number of elements",
                dtype.name()
            )));
        }
        Ok(Self { memory: Memory::Here(Host::new(memory)), dtype })
    }

    /// Creates a gradient of `nbytes` bytes of `dtype`. The engine calls `source` for each window of the gradient.
    /// Returns an error if a gradient cannot have this dtype, or if `nbytes` is not a whole number of elements.
    pub fn lent(source: Box<Source>, nbytes: usize, dtype: Dtype) -> Result<Self> {
        if !nbytes.is_multiple_of(require_float(dtype)?) {
            return Err(Error::Invalid(format!(
                "a gradient of {nbytes} bytes does not have a whole number of {} elements: give all bytes of the \
                 gradient",
                dtype.name()
            )));
        }
        Ok(Self { memory: Memory::Away { source, nbytes, window: Cell::new(None) }, dtype })
    }

    /// Returns the size of the gradient in bytes.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        match &self.memory {
            Memory::Here(memory) => memory.len(),
            Memory::Away { nbytes, .. } => *nbytes,
        }
    }

    /// Returns the host memory of the gradient. Returns an error if a source lends the gradient.
    pub(crate) fn memory(&self) -> Result<Arc<Host>> {
        match &self.memory {
            Memory::Here(memory) => Ok(Arc::clone(memory)),
            Memory::Away { .. } => Err(Error::Invalid(
                "the gradient of a record in RAM must be in host memory: copy the gradient to host memory first".into(),
            )),
        }
    }

    /// True if the gradient is in host memory.
    pub(crate) fn is_here(&self) -> bool {
        matches!(self.memory, Memory::Here(_))
    }

    pub(crate) fn elements(&self) -> u64 {
        self.nbytes() as u64 / self.dtype.bytes()
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns `nbytes` bytes of the gradient, beginning with byte `start`. Panics if the gradient ends before this
    /// range ends. Bytes that a source lent are valid until the engine calls a source again.
    pub(crate) fn bytes(&self, store: &Store, record: usize, start: usize, nbytes: usize) -> Result<&[u8]> {
        let first = self.at(store, record, start, nbytes)?;
        // SAFETY: `at` checked the range. Host memory stays mapped while `self` lives, and nothing writes to it ([Note:
        // handed-over memory]). A window stays valid and unchanged until the engine calls a source again
        // (`Window::new`), and callers do not use the bytes after that.
        Ok(unsafe { elements(first, 0, nbytes) })
    }

    /// Returns `count` elements of the gradient, beginning with element `start`. Panics if the gradient ends before
    /// this range ends. Elements that a source lent are valid until the engine calls a source again.
    pub(crate) fn part(&self, store: &Store, record: usize, start: usize, count: usize) -> Result<Floats<'_>> {
        let element = self.dtype.bytes() as usize;
        let first = self.at(store, record, start * element, count * element)?;
        // SAFETY: `at` checked the range. The memory stays valid and unchanged, as in `bytes`. It is aligned for the
        // dtype, as `Gradient::new` and `Window::new` require.
        Ok(unsafe { floats_at(first, self.dtype, 0, count) })
    }

    /// Returns `count` elements of a float64 gradient, beginning with element `start`. Panics if the gradient has
    /// another dtype, or ends before this range ends. Elements that a source lent are valid until the engine calls a
    /// source again.
    pub(crate) fn doubles(&self, store: &Store, record: usize, start: usize, count: usize) -> Result<&[f64]> {
        assert_eq!(self.dtype, Dtype::F64, "a gradient of another dtype");
        let first = self.at(store, record, start * size_of::<f64>(), count * size_of::<f64>())?;
        // SAFETY: `at` checked the range. The memory stays valid and unchanged, as in `bytes`, and is aligned for
        // float64.
        Ok(unsafe { elements(first, 0, count) })
    }

    /// Returns the address of `nbytes` bytes of the gradient, beginning with byte `start`. Calls the source if its last
    /// window does not have all of these bytes, and returns the error of the source. Panics if the gradient ends before
    /// these bytes end, or if the source lends a window without them.
    fn at(&self, store: &Store, record: usize, start: usize, nbytes: usize) -> Result<*const u8> {
        assert!(start + nbytes <= self.nbytes(), "bytes past the end of a gradient");
        let (memory, from) = match &self.memory {
            Memory::Here(memory) => (memory.as_ptr(), 0),
            Memory::Away { source, window, .. } => {
                let holds = |lent: &Window| lent.start <= start && start + nbytes <= lent.start + lent.nbytes;
                let lent = match window.get().filter(holds) {
                    Some(lent) => lent,
                    None => source(start, nbytes).map_err(|cause| {
                        let name = store.description().records[record].name.clone();
                        Error::Function { name, cause }
                    })?,
                };
                assert!(holds(&lent), "a source lent other bytes than it was asked for");
                window.set(Some(lent));
                (lent.address.as_ptr().cast_const(), lent.start)
            }
        };
        // SAFETY: the assertions above keep the range inside the memory of the gradient, or inside the window.
        Ok(unsafe { memory.add(start - from) })
    }
}

/// Returns the size of an element of `dtype` in bytes. Returns an error if a gradient cannot have this dtype.
fn require_float(dtype: Dtype) -> Result<usize> {
    if dtype != Dtype::F64 {
        require_update(dtype)?;
    }
    Ok(dtype.bytes() as usize)
}

/// Returns an error if the update kernels cannot use a gradient of `dtype`.
pub(crate) fn require_update(dtype: Dtype) -> Result<()> {
    if matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16) {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "the engine cannot update with a gradient of {}: use float32, bfloat16 or float16",
        dtype.name()
    )))
}

/// Returns `count` float64 elements of `memory`, beginning with element `start`. `memory` must be aligned for float64.
pub(crate) fn doubles(memory: &dyn Buffer, start: usize, count: usize) -> &[f64] {
    assert!((start + count) * size_of::<f64>() <= memory.len(), "elements past the end of a tensor");
    // SAFETY: the assertion above keeps the elements inside `memory`. The memory is aligned for float64 and stays
    // mapped while it is borrowed, and nothing writes to it meanwhile.
    unsafe { elements(memory.as_ptr(), start, count) }
}

/// Returns `count` elements of `memory`, beginning with element `start`. `dtype` must be float32, bfloat16 or float16.
/// `memory` must be aligned for `dtype`.
pub(crate) fn floats(memory: &dyn Buffer, dtype: Dtype, start: usize, count: usize) -> Floats<'_> {
    assert!((start + count) as u64 * dtype.bytes() <= memory.len() as u64, "elements past the end of a tensor");
    // SAFETY: the assertion above keeps the elements inside `memory`. The memory is aligned for the dtype and stays
    // mapped while it is borrowed. Callers do not write to `memory` meanwhile ([Note: handed-over memory]). If `memory`
    // belongs to a turn, like a staging chunk, only this turn could write to it, and this turn is reading.
    unsafe { floats_at(memory.as_ptr(), dtype, start, count) }
}

/// # Safety
/// The conditions of [`elements`] must hold for the element type of `dtype`.
unsafe fn floats_at<'a>(memory: *const u8, dtype: Dtype, start: usize, count: usize) -> Floats<'a> {
    match dtype {
        // SAFETY: the caller meets the conditions of `elements` for this type.
        Dtype::F32 => Floats::F32(unsafe { elements(memory, start, count) }),
        // SAFETY: the caller meets the conditions of `elements` for this type.
        Dtype::Bf16 => Floats::Bf16(unsafe { elements::<Bf16>(memory, start, count) }),
        // SAFETY: the caller meets the conditions of `elements` for this type.
        _ => Floats::F16(unsafe { elements::<F16>(memory, start, count) }),
    }
}

/// # Safety
/// While the slice lives, `memory` must hold at least `start + count` aligned and valid elements, and nothing may write
/// to them.
unsafe fn elements<'a, T>(memory: *const u8, start: usize, count: usize) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller guarantees `start + count` elements at `memory`.
    let first = unsafe { memory.cast::<T>().add(start) };
    // SAFETY: the caller guarantees that the `count` elements are aligned and that nothing writes to them.
    unsafe { std::slice::from_raw_parts(first, count) }
}
