//! Names the format features that a store uses, so that a reader can name the feature that it does not know.

use crate::fields::DecodeError;

/// Most bytes of a feature's name.
pub(crate) const FEATURE_BYTES_MAX: usize = 64;
/// The features that this version can read.
const KNOWN: [&str; 5] = [LOG, PLACES, RANKS, IDENTITY, FIRSTS];
/// Required in a root that names a log head.
pub(crate) const LOG: &str = "gradient log";
/// Required in addition to [`LOG`] if the root's log head names spilled gradients, which are outside of the log's ring.
pub(crate) const PLACES: &str = "gradients in place";
/// Required in a root whose commit belongs to a run of several ranks.
pub(crate) const RANKS: &str = "several ranks";
/// Required in addition to [`RANKS`]: the root has the identity of the commit and the rank of the store.
pub(crate) const IDENTITY: &str = "commit identity";
/// Required in a description that has each record's first element in the whole parameter.
pub(crate) const FIRSTS: &str = "first elements";

/// Rejects a list with a feature that this version cannot read; the error names the first such feature.
pub(crate) fn known(features: &[String]) -> Result<(), DecodeError> {
    match features.iter().find(|feature| !KNOWN.contains(&feature.as_str())) {
        Some(feature) => Err(DecodeError::Newer(format!("{feature:?}"))),
        None => Ok(()),
    }
}
