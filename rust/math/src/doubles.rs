//! Adds and checks float64 gradients, for parameters that torch's own code updates.
//!
//! Float64 gradients are rare, so plain loops are fast enough. One thread adds in one order, so every machine gives the
//! same bits.

use crate::{Check, Error, Result, Squares};

/// The number of sums that are computed side by side.
const LANES: usize = 8;

/// Computes `total += other`, like torch's `total.add_(other)`.
pub fn add_doubles(total: &mut [f64], other: &[f64]) -> Result<()> {
    if other.len() != total.len() {
        return Err(Error::Length { name: "other", len: other.len(), other: "total", other_len: total.len() });
    }
    for (total, other) in total.iter_mut().zip(other) {
        *total += other;
    }
    Ok(())
}

/// Checks `data` as [`crate::check`] does, but rounds the sum of squares to float64 after each addition. So the sum is
/// also infinite if it exceeds the range of float64.
#[must_use]
pub fn check_doubles(data: &[f64]) -> Check {
    let mut sums = [0.0_f64; LANES];
    let mut nonfinite = false;
    for group in data.chunks(LANES) {
        for (sum, value) in sums.iter_mut().zip(group) {
            *sum += value * value;
            nonfinite |= !value.is_finite();
        }
    }
    Check { nonfinite, squares: Squares::rounded(sums.iter().sum()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn float64_sums_and_squares_have_float64_precision() {
        // float32 cannot represent these sums.
        let mut total: Vec<f64> = (0..21).map(|i| 1.0 + f64::from(i) * 1e-12).collect();
        let other: Vec<f64> = (0..21).map(|i| 1e-15 * f64::from(i) - 1e200).collect();
        let wanted: Vec<f64> = total.iter().zip(&other).map(|(a, b)| a + b).collect();
        assert_eq!(add_doubles(&mut total, &other), Ok(()));
        assert_eq!(total, wanted);
        assert!(add_doubles(&mut total, &other[1..]).is_err());

        let found = check_doubles(&[3e100, 4e100, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 12e100]);
        assert!(!found.nonfinite);
        assert!((found.squares.value().sqrt() / 1.3e101 - 1.0).abs() < 1e-15);
        assert_eq!(check_doubles(&[]), Check { nonfinite: false, squares: Squares::ZERO });
    }

    #[test]
    fn check_doubles_distinguishes_nonfinite_elements_from_overflow() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for place in 0..11 {
                let mut data = [1.0; 11];
                data[place] = bad;
                let found = check_doubles(&data);
                assert!(found.nonfinite && !found.squares.value().is_finite(), "{bad} at {place}");
            }
        }
        let large = check_doubles(&[1e200]);
        assert!(!large.nonfinite && large.squares.value().is_infinite());
    }
}
