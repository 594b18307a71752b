//! Names the format features that a store uses, so that a reader can say which it lacks.

use crate::fields::Unread;

/// Bytes of a feature's name.
pub(crate) const FEATURE_BYTES_MAX: usize = 64;
/// The features that are known here.
const KNOWN: [&str; 5] = [LOG, PLACES, RANKS, IDENTITY, FIRSTS];
/// What a root must name that has a log.
pub(crate) const LOG: &str = "gradient log";
/// What it must name beside that where gradients lie outside of the log's ring: where they were spilled.
pub(crate) const PLACES: &str = "gradients in place";
/// What a root must name that belongs to a run of several ranks.
pub(crate) const RANKS: &str = "several ranks";
/// What it must name beside that: its commit has an identity, and it says which rank's it is.
pub(crate) const IDENTITY: &str = "commit identity";
/// What a description must name to say where in whole parameters its records begin.
pub(crate) const FIRSTS: &str = "first elements";

/// Refuses the first feature that is not known here.
pub(crate) fn known(features: &[String]) -> Result<(), Unread> {
    match features.iter().find(|feature| !KNOWN.contains(&feature.as_str())) {
        Some(feature) => Err(Unread::Newer(format!("{feature:?}"))),
        None => Ok(()),
    }
}
