//! Maps each byte of a volume to its device and offset.
//!
//! Stripe `k` of the volume is on device `k % devices`, as that device's stripe `k / devices`. A volume over one device
//! has no stripes: its offsets are the offsets of the device.

/// The default width of a stripe: one whole request, so that a large transfer keeps every device busy with requests of
/// the size at which disks are fastest.
pub const STRIPE_BYTES_DEFAULT: u64 = 1 << 20;
/// The smallest and the largest width of a stripe. A stripe smaller than a page would split each page into several
/// requests. With stripes of more than 1 GiB, most transfers would use only one device.
pub(crate) const STRIPE_BYTES_MIN: u64 = 4096;
pub(crate) const STRIPE_BYTES_MAX: u64 = 1 << 30;

/// How the bytes of a volume are spread over its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Striping {
    devices: u64,
    stripe_bytes: u64,
}

/// Where a byte of the volume is stored: the device, and the offset on the device. From this offset on, the next
/// `contiguous_bytes` bytes of the volume are on the same device without a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) device: usize,
    pub(crate) offset: u64,
    pub(crate) contiguous_bytes: u64,
}

impl Striping {
    pub(crate) fn new(devices: usize, stripe_bytes: u64) -> Self {
        debug_assert!(devices > 0 && stripe_bytes > 0);
        Self { devices: devices as u64, stripe_bytes }
    }

    #[expect(clippy::cast_possible_truncation, reason = "less than the number of devices, which is a usize")]
    pub(crate) fn locate(self, offset: u64) -> Location {
        if self.devices == 1 {
            return Location { device: 0, offset, contiguous_bytes: u64::MAX - offset };
        }
        let (stripe, within) = (offset / self.stripe_bytes, offset % self.stripe_bytes);
        Location {
            device: (stripe % self.devices) as usize,
            offset: stripe / self.devices * self.stripe_bytes + within,
            contiguous_bytes: self.stripe_bytes - within,
        }
    }

    /// Returns the number of bytes that each device must hold for a volume of `size_bytes`; `None` on overflow.
    pub(crate) fn device_bytes(self, size_bytes: u64, block_bytes: u64) -> Option<u64> {
        let unit = if self.devices == 1 { block_bytes } else { self.stripe_bytes };
        size_bytes.div_ceil(unit * self.devices).checked_mul(unit)
    }

    /// Returns the size in bytes of a volume whose smallest device has `device_bytes` bytes.
    pub(crate) fn volume_bytes(self, device_bytes: u64, block_bytes: u64) -> u64 {
        let unit = if self.devices == 1 { block_bytes } else { self.stripe_bytes };
        device_bytes / unit * unit * self.devices
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn locate_distributes_stripes_round_robin() {
        let striping = Striping::new(3, 4096);
        assert_eq!(striping.locate(0), Location { device: 0, offset: 0, contiguous_bytes: 4096 });
        assert_eq!(striping.locate(4097), Location { device: 1, offset: 1, contiguous_bytes: 4095 });
        assert_eq!(striping.locate(4096 * 4 + 5), Location { device: 1, offset: 4101, contiguous_bytes: 4091 });
    }

    proptest! {
        #[test]
        fn every_byte_has_a_place_of_its_own(devices in 1_usize..5, stripes in 1_u64..9, stripe in 1_u64..5) {
            let striping = Striping::new(devices, stripe);
            let size = stripes * stripe * devices as u64;
            let need = striping.device_bytes(size, 1);
            let places: HashSet<_> = (0..size).map(|byte| striping.locate(byte)).map(|at| (at.device, at.offset)).collect();
            prop_assert_eq!(places.len() as u64, size);
            prop_assert!(places.iter().all(|&(device, offset)| device < devices && Some(offset) < need));
            prop_assert_eq!(need.map(|bytes| striping.volume_bytes(bytes, 1)), Some(size));
        }
    }
}
