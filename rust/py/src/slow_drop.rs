//! Drops slow objects without the GIL, so that other Python threads run meanwhile.

use std::{mem::ManuallyDrop, ops::Deref};

use pyo3::Python;

/// A value whose drop is slow, for example because it waits for devices or threads.
pub(crate) struct Detached<T: Send>(ManuallyDrop<T>);

impl<T: Send> Detached<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        // SAFETY: this takes the value once, when `self` is dropped, and nothing uses `self.0` afterwards.
        let mut value = Some(unsafe { ManuallyDrop::take(&mut self.0) });
        // While the interpreter ends, the GIL cannot be released. No other Python thread runs then, so the drop delays
        // no other thread.
        let detached = Python::try_attach(|py| {
            let value = value.take();
            py.detach(|| drop(value));
        });
        if detached.is_none() {
            drop(value);
        }
    }
}
