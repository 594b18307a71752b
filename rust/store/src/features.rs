//! Names the format features a store uses, so that an older reader can say which it lacks.

use crate::fields::Unread;

/// Bytes of a feature's name.
pub(crate) const FEATURE_BYTES_MAX: usize = 64;
/// The features that are known here.
const KNOWN: [&str; 4] = [LOG, RANKS, IDENTITY, FIRSTS];
/// What a root must name before its fields for a log may say something.
pub(crate) const LOG: &str = "gradient log";
/// What a root must name before its fields for a run of several ranks may say something.
pub(crate) const RANKS: &str = "several ranks";
/// What a root must name to have the identity of its commit, and whose store it is of several ranks.
pub(crate) const IDENTITY: &str = "commit identity";
/// What a description must name to say where in whole parameters its entries begin.
pub(crate) const FIRSTS: &str = "first elements";

/// Refuses the first feature that is not known here.
pub(crate) fn known(features: &[String]) -> Result<(), Unread> {
    match features.iter().find(|feature| !KNOWN.contains(&feature.as_str())) {
        Some(feature) => Err(Unread::Newer(format!("{feature:?}"))),
        None => Ok(()),
    }
}
