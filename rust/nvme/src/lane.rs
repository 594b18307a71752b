//! Lanes: order the requests that wait for a place in the device's queue.

/// The order in which waiting requests are given to the devices. What a device has already is not called back, so a
/// request of the first lane waits for at most the queue depth.
///
/// Nothing ages from the second lane into the first: whoever uses the first bounds what is in it. Prefetched units are
/// bounded by the memory that they are read into, and each is read once for the computation that needs it, so between two
/// of them the second lane always has its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lane {
    /// What somebody waits for, or soon will.
    First,
    /// Everything else.
    #[default]
    Second,
}
