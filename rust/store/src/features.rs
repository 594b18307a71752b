//! Names the format features a store uses, so that an older reader can say which it lacks.

use crate::fields::Unread;

/// Bytes of a feature's name.
pub(crate) const FEATURE_BYTES_MAX: usize = 64;
/// The features that are known here.
const KNOWN: [&str; 2] = [LOG, RANKS];
/// What a root must name before its fields for a log may say something.
pub(crate) const LOG: &str = "gradient log";
/// What a root must name before its fields for a run of several ranks may say something.
pub(crate) const RANKS: &str = "several ranks";

/// Refuses the first feature that is not known here.
pub(crate) fn known(features: &[String]) -> Result<(), Unread> {
    match features.iter().find(|feature| !KNOWN.contains(&feature.as_str())) {
        Some(feature) => Err(Unread::Newer(format!("{feature:?}"))),
        None => Ok(()),
    }
}
