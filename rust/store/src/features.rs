//! Names the features of the format. A root or a description lists the features that it uses. So a reader that does not
//! know one of these features can reject the store with an error that names the feature.

use crate::fields::DecodeError;

/// The largest size in bytes of a feature's name.
pub(crate) const FEATURE_BYTES_MAX: usize = 64;
/// The features that this version can read.
const KNOWN: [&str; 5] = [LOG, PLACES, RANKS, IDENTITY, FIRSTS];
/// A root that names a log head must list this feature.
pub(crate) const LOG: &str = "gradient log";
/// Spilled gradients are outside of the log's ring. A root must list both [`LOG`] and this feature if it needs a log
/// head that names spilled gradients.
pub(crate) const PLACES: &str = "gradients in place";
/// A root must list this feature if its commit belongs to a run of several ranks.
pub(crate) const RANKS: &str = "several ranks";
/// A root that lists [`RANKS`] must also list this feature. A root with this feature has the identity of the commit and
/// the rank of the store.
pub(crate) const IDENTITY: &str = "commit identity";
/// A description must list this feature if it has the index of each record's first element in the whole parameter.
pub(crate) const FIRSTS: &str = "first elements";

/// Rejects a list of features if this version does not know one of them. The error names the first unknown feature.
pub(crate) fn known(features: &[String]) -> Result<(), DecodeError> {
    match features.iter().find(|feature| !KNOWN.contains(&feature.as_str())) {
        Some(feature) => Err(DecodeError::Newer(format!("{feature:?}"))),
        None => Ok(()),
    }
}
