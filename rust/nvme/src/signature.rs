//! Detects data of other programs on a block device: file systems, partition tables, LVM, RAID, encryption.
//!
//! `raw::refuse_foreign` rejects a device on which `find` finds a signature. A user who does not need the data runs
//! `wipefs` first.

/// The number of bytes at each end of a device that `find` searches for signatures.
pub(crate) const EDGE_BYTES: usize = 256 << 10;

/// A signature at a fixed offset from the start of the device.
struct Magic {
    what: &'static str,
    offset: usize,
    bytes: &'static [u8],
}

const fn magic(what: &'static str, offset: usize, bytes: &'static [u8]) -> Magic {
    Magic { what, offset, bytes }
}

/// Signatures at fixed offsets. Each signature has at least four bytes, so random data almost never matches.
const AT_START: &[Magic] = &[
    magic("an XFS file system", 0, b"XFSB"),
    magic("a btrfs file system", 0x1_0040, b"_BHRfS_M"),
    magic("a bcachefs or bcache device", 0x1018, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca"),
    magic("a bcachefs file system", 0x1018, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9"),
    magic("an F2FS file system", 0x400, b"\x10\x20\xf5\xf2"),
    magic("an EROFS file system", 0x400, b"\xe2\xe1\xf5\xe0"),
    magic("a squashfs file system", 0, b"hsqs"),
    magic("an ISO 9660 file system", 0x8001, b"CD001"),
    magic("a UDF file system", 0x8001, b"BEA01"),
    magic("a JFS file system", 0x8000, b"JFS1"),
    magic("a ReiserFS file system", 0x1_0034, b"ReIsEr"),
    magic("an OCFS2 file system", 0x2000, b"OCFSV2"),
    magic("a GFS2 file system", 0x1_0000, b"\x01\x16\x19\x70\x00\x00\x00\x01"),
    magic("a NTFS file system", 3, b"NTFS    "),
    magic("an exFAT file system", 3, b"EXFAT   "),
    magic("a BitLocker volume", 3, b"-FVE-FS-"),
    magic("a FAT file system", 54, b"FAT12   "),
    magic("a FAT file system", 54, b"FAT16   "),
    magic("a FAT file system", 82, b"FAT32   "),
    magic("an encrypted volume (LUKS)", 0, b"LUKS\xba\xbe"),
    magic("an encrypted volume (LUKS)", 0x4000, b"SKUL\xba\xbe"),
    magic("an LVM physical volume", 24, b"LVM2 001"),
    magic("an LVM physical volume", 536, b"LVM2 001"),
    magic("an LVM physical volume", 1048, b"LVM2 001"),
    magic("an LVM physical volume", 1560, b"LVM2 001"),
    magic("a RAID member (md 1.1)", 0, b"\xfc\x4e\x2b\xa9\x01\x00\x00\x00"),
    magic("a RAID member (md 1.2)", 4096, b"\xfc\x4e\x2b\xa9\x01\x00\x00\x00"),
    magic("a partition table (GPT)", 512, b"EFI PART"),
    magic("a partition table (GPT)", 4096, b"EFI PART"),
    magic("a swap area", 4086, b"SWAPSPACE2"),
    magic("a swap area", 4086, b"SWAP-SPACE"),
    magic("a hibernated system", 4086, b"S1SUSPEND"),
    magic("a swap area", 65_526, b"SWAPSPACE2"),
    magic("a Ceph BlueStore device", 0, b"bluestore block device"),
    magic("a VDO volume", 0, b"dmvdo001"),
    magic("a Stratis device", 512, b"!Stra0tis\x86\xff\x02^\x41rh"),
];

/// Signatures near the end of the device, as (what, distance before the end, bytes).
const BEFORE_END: &[(&str, usize, &[u8])] = &[
    ("a partition table (GPT, second copy)", 512, b"EFI PART"),
    ("a partition table (GPT, second copy)", 4096, b"EFI PART"),
    ("a RAID member (DDF)", 512, b"\x11\xde\x11\xde"),
    ("a RAID member (DDF)", 512, b"\xde\x11\xde\x11"),
    ("a RAID member (Intel)", 1024, b"Intel Raid ISM Cfg Sig. "),
];

/// The first and the last [`EDGE_BYTES`] of a device, and its size. If the device is smaller than [`EDGE_BYTES`], each
/// slice holds the whole device.
#[derive(Debug)]
pub(crate) struct Edges<'a> {
    pub(crate) first: &'a [u8],
    pub(crate) last: &'a [u8],
    pub(crate) device_bytes: u64,
}

/// Returns a name for the data on the device; `None` if no signature matches.
pub(crate) fn find(edges: &Edges<'_>) -> Option<&'static str> {
    let Edges { first, last, .. } = *edges;
    AT_START
        .iter()
        .find(|magic| holds(first, magic.offset, magic.bytes))
        .map(|magic| magic.what)
        .or_else(|| {
            let from_end = |(_, distance, bytes): &&(_, usize, &[u8])| {
                last.len().checked_sub(*distance).is_some_and(|offset| holds(last, offset, bytes))
            };
            BEFORE_END.iter().find(from_end).map(|(what, _, _)| *what)
        })
        .or_else(|| ext(first).then_some("an ext2, ext3 or ext4 file system"))
        .or_else(|| partitioned(first).then_some("a partition table (MBR)"))
        .or_else(|| raid_at_end(edges).then_some("a RAID member (md)"))
        .or_else(|| (zfs(first) || zfs(last)).then_some("a ZFS member"))
}

fn holds(bytes: &[u8], offset: usize, magic: &[u8]) -> bool {
    bytes.get(offset..).is_some_and(|rest| rest.starts_with(magic))
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    bytes.get(offset..)?.first_chunk().map(|bytes| u16::from_le_bytes(*bytes))
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes.get(offset..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

/// True if `first` has an ext superblock. The magic of ext has only two bytes, and a store of memascend may have the
/// same two bytes by chance. So other fields of the superblock must be plausible too.
fn ext(first: &[u8]) -> bool {
    const SUPERBLOCK: usize = 1024;
    let word = |offset| u32_at(first, SUPERBLOCK + offset);
    let half = |offset| u16_at(first, SUPERBLOCK + offset);
    half(0x38) == Some(0xef53)
        && word(0x18).is_some_and(|log_block| log_block <= 6)
        && word(0x4).is_some_and(|blocks| blocks > 0)
        && word(0x4c).is_some_and(|revision| revision <= 1)
        && half(0x3a).is_some_and(|state| state <= 7)
}

/// True if `first` begins with a boot sector that has partitions. The magic of a boot sector has only two bytes. So all
/// four partition entries must be plausible too, and at least one entry must be in use.
fn partitioned(first: &[u8]) -> bool {
    let entry = |index: usize| first.get(446 + index * 16..462 + index * 16);
    let entries: Option<Vec<&[u8]>> = (0..4).map(entry).collect();
    let Some(entries) = entries else { return false };
    let sound = |entry: &&[u8]| entry[0] == 0 || entry[0] == 0x80;
    let used = |entry: &&[u8]| entry[4] != 0 && u32_at(entry, 12).is_some_and(|sectors| sectors > 0);
    holds(first, 510, b"\x55\xaa") && entries.iter().all(sound) && entries.iter().any(used)
}

/// True if metadata of an md RAID is at the end of the device. Metadata of version 0.90 is at the start of the last
/// whole block of 64 KiB. Metadata of version 1.0 is at the last multiple of 4 KiB that is at least 8 KiB before the
/// end.
fn raid_at_end(edges: &Edges<'_>) -> bool {
    const MAGIC: &[u8] = b"\xfc\x4e\x2b\xa9";
    let size = edges.device_bytes;
    let before_end = |place: u64| {
        let distance = usize::try_from(size.checked_sub(place)?).ok()?;
        edges.last.len().checked_sub(distance)
    };
    let version_0 = (size / 65_536 * 65_536).checked_sub(65_536);
    let version_1 = (size / 512).checked_sub(16).map(|sector| sector / 8 * 8 * 512);
    [version_0, version_1].into_iter().flatten().filter_map(before_end).any(|offset| holds(edges.last, offset, MAGIC))
}

/// True if `edge` has a ZFS uberblock. A ZFS label has 256 KiB, and the second half of a label has uberblocks, 1 KiB
/// apart.
fn zfs(edge: &[u8]) -> bool {
    const RING: usize = 128 << 10;
    (RING..EDGE_BYTES).step_by(1024).any(|offset| {
        holds(edge, offset, b"\x0c\xb1\xba\x00\x00\x00\x00\x00")
            || holds(edge, offset, b"\x00\x00\x00\x00\x00\xba\xb1\x0c")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(bytes: &[u8]) -> Edges<'_> {
        let edge = EDGE_BYTES.min(bytes.len());
        Edges { first: &bytes[..edge], last: &bytes[bytes.len() - edge..], device_bytes: bytes.len() as u64 }
    }

    #[test]
    fn find_ignores_lone_magic_bytes_and_finds_a_superblock() {
        let mut bytes = vec![0; 1 << 20];
        assert_eq!(find(&edges(&bytes)), None);
        assert_eq!(find(&edges(&bytes[..4096])), None, "a device smaller than any label");
        bytes[510..512].copy_from_slice(b"\x55\xaa");
        bytes[1080..1082].copy_from_slice(&0xef53_u16.to_le_bytes());
        assert_eq!(find(&edges(&bytes)), None, "two bytes alone prove nothing");
        for (offset, word) in [(0x4, 256), (0x18, 2), (0x38, 0x1_ef53), (0x4c, 1_u32)] {
            bytes[1024 + offset..][..4].copy_from_slice(&word.to_le_bytes());
        }
        assert_eq!(find(&edges(&bytes)), Some("an ext2, ext3 or ext4 file system"));
    }

    #[test]
    fn every_signature_in_the_tables_is_found() {
        for magic in AT_START {
            let mut bytes = vec![0; 1 << 20];
            bytes[magic.offset..magic.offset + magic.bytes.len()].copy_from_slice(magic.bytes);
            assert!(find(&edges(&bytes)).is_some(), "{}", magic.what);
        }
        for (what, distance, magic) in BEFORE_END {
            let mut bytes = vec![0; 1 << 20];
            let offset = bytes.len() - distance;
            bytes[offset..offset + magic.len()].copy_from_slice(magic);
            assert_eq!(find(&edges(&bytes)), Some(*what));
        }
    }
}
