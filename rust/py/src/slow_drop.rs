//! Drops slow objects without the GIL, so that other Python threads run meanwhile.

use std::{mem::ManuallyDrop, ops::Deref};

use pyo3::Python;

/// A value whose drop waits, for devices or for threads.
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
        // SAFETY: dropped once, here, and not used afterwards.
        let mut value = Some(unsafe { ManuallyDrop::take(&mut self.0) });
        // At the end of the interpreter nobody else runs, and it can no longer be let go.
        let let_go = Python::try_attach(|py| {
            let value = value.take();
            py.detach(|| drop(value));
        });
        if let_go.is_none() {
            drop(value);
        }
    }
}
