//! Defines gradients: memory held until it is used, or a source that lends it window by window.

use std::{cell::Cell, ptr::NonNull, sync::Arc};

use memascend_math::{Bf16, F16, Floats};
use memascend_store::{Buffer, Dtype, Store};

use crate::{Cause, Error, Result};

/// A parameter's gradient, contiguous in the parameter's own order.
pub struct Gradient {
    memory: Memory,
    dtype: Dtype,
}

enum Memory {
    Here(Arc<Host>),
    /// Elsewhere, and what of it is here now.
    Away {
        source: Box<Source>,
        nbytes: usize,
        window: Cell<Option<Window>>,
    },
}

/// A gradient in host memory, which several may read.
pub(crate) struct Host(Box<dyn Buffer>);

// SAFETY: nobody writes to a gradient that was handed over; it is read from any thread.
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

/// Lends a gradient that lies where the engine cannot read it, on a device: `(start, nbytes)` gives these bytes of it in host
/// memory and, if that costs nothing, more. They stay as they are until the next call of any source of the engine's. Called
/// on the engine's thread, in order; it must not wait for the engine.
pub type Source = dyn Fn(usize, usize) -> std::result::Result<Window, Cause> + Send;

/// Bytes of a gradient that are in host memory now.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    address: NonNull<u8>,
    start: usize,
    nbytes: usize,
}

// SAFETY: it is read by the engine's thread alone, between two calls of its source.
unsafe impl Send for Window {}

impl Window {
    /// `nbytes` of a gradient from its byte `start` on, at `address`.
    ///
    /// # Safety
    /// The memory is mapped, aligned for the gradient's dtype, and nobody writes to it until the next call of a source of
    /// the engine that it is for, or until all jobs of the source have ended.
    #[must_use]
    pub unsafe fn new(address: NonNull<u8>, start: usize, nbytes: usize) -> Self {
        Self { address, start, nbytes }
    }
}

impl Gradient {
    /// A gradient of `dtype` that lies in `memory`, aligned for it.
    pub fn new(memory: Box<dyn Buffer>, dtype: Dtype) -> Result<Self> {
        let element = require_float(dtype)?;
        if !memory.is_empty()
            && (!memory.as_ptr().addr().is_multiple_of(element) || !memory.len().is_multiple_of(element))
        {
            return Err(Error::Invalid(format!("the gradient's memory is not aligned for {}", dtype.name())));
        }
        Ok(Self { memory: Memory::Here(Host::new(memory)), dtype })
    }

    /// A gradient of `nbytes` of `dtype` that is lent by `source` as it is needed.
    pub fn lent(source: Box<Source>, nbytes: usize, dtype: Dtype) -> Result<Self> {
        if !nbytes.is_multiple_of(require_float(dtype)?) {
            return Err(Error::Invalid(format!("{nbytes} bytes are no number of {}", dtype.name())));
        }
        Ok(Self { memory: Memory::Away { source, nbytes, window: Cell::new(None) }, dtype })
    }

    /// Bytes of it, which are held until it was used.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        match &self.memory {
            Memory::Here(memory) => memory.len(),
            Memory::Away { nbytes, .. } => *nbytes,
        }
    }

    /// Its memory, where that is the host's.
    pub(crate) fn memory(&self) -> Result<Arc<Host>> {
        match &self.memory {
            Memory::Here(memory) => Ok(Arc::clone(memory)),
            Memory::Away { .. } => Err(Error::Invalid("a gradient of a record in RAM lies in host memory".into())),
        }
    }

    /// Whether it lies in host memory.
    pub(crate) fn is_here(&self) -> bool {
        matches!(self.memory, Memory::Here(_))
    }

    pub(crate) fn elements(&self) -> u64 {
        self.nbytes() as u64 / self.dtype.bytes()
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// `nbytes` from byte `start` on, which lie inside. Of a source, until the next call of this or another.
    pub(crate) fn bytes(&self, store: &Store, record: usize, start: usize, nbytes: usize) -> Result<&[u8]> {
        let first = self.at(store, record, start, nbytes)?;
        // SAFETY: inside the memory, which is mapped while it is held; nobody writes to a gradient that was handed over.
        Ok(unsafe { elements(first, 0, nbytes) })
    }

    /// `count` elements from `start` on, which lie inside. Of a source, until the next call of this or another.
    pub(crate) fn part(&self, store: &Store, record: usize, start: usize, count: usize) -> Result<Floats<'_>> {
        let element = self.dtype.bytes() as usize;
        let first = self.at(store, record, start * element, count * element)?;
        // SAFETY: inside the memory, which is mapped while it is held and aligned; nobody writes to a gradient that was
        // handed over.
        Ok(unsafe { floats_at(first, self.dtype, 0, count) })
    }

    /// As [`Gradient::part`], of a gradient of float64.
    pub(crate) fn doubles(&self, store: &Store, record: usize, start: usize, count: usize) -> Result<&[f64]> {
        assert_eq!(self.dtype, Dtype::F64, "a gradient of another dtype");
        let first = self.at(store, record, start * size_of::<f64>(), count * size_of::<f64>())?;
        // SAFETY: as above.
        Ok(unsafe { elements(first, 0, count) })
    }

    /// Where `nbytes` from byte `start` on lie.
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
        // SAFETY: inside the memory.
        Ok(unsafe { memory.add(start - from) })
    }
}

/// The bytes of an element of a dtype that gradients have.
fn require_float(dtype: Dtype) -> Result<usize> {
    if dtype != Dtype::F64 {
        require_update(dtype)?;
    }
    Ok(dtype.bytes() as usize)
}

/// Refuses a gradient of a dtype that the kernels do not update by.
pub(crate) fn require_update(dtype: Dtype) -> Result<()> {
    if matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16) {
        return Ok(());
    }
    Err(Error::Invalid(format!("a gradient of {}: float32, bfloat16 and float16 have an update", dtype.name())))
}

/// As [`floats`], of memory that holds float64.
pub(crate) fn doubles(memory: &dyn Buffer, start: usize, count: usize) -> &[f64] {
    assert!((start + count) * size_of::<f64>() <= memory.len(), "elements past the end of a tensor");
    // SAFETY: as in `floats`.
    unsafe { elements(memory.as_ptr(), start, count) }
}

/// `count` elements from `start` on of memory that is aligned for its dtype, one of the three that kernels know.
pub(crate) fn floats(memory: &dyn Buffer, dtype: Dtype, start: usize, count: usize) -> Floats<'_> {
    assert!((start + count) as u64 * dtype.bytes() <= memory.len() as u64, "elements past the end of a tensor");
    // SAFETY: inside the memory, which is mapped while it is held and aligned; nobody writes to a tensor that was handed
    // over.
    unsafe { floats_at(memory.as_ptr(), dtype, start, count) }
}

/// # Safety
/// As [`elements`], for `dtype`.
unsafe fn floats_at<'a>(memory: *const u8, dtype: Dtype, start: usize, count: usize) -> Floats<'a> {
    match dtype {
        // SAFETY: the caller's.
        Dtype::F32 => Floats::F32(unsafe { elements(memory, start, count) }),
        // SAFETY: the caller's.
        Dtype::Bf16 => Floats::Bf16(unsafe { elements::<Bf16>(memory, start, count) }),
        // SAFETY: the caller's.
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
