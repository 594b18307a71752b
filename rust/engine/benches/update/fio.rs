//! Runs fio with the same number of bytes, share of reads and queue depth as the update.

use std::{path::Path, process::Command};

use crate::Outcome;

const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";
/// The number of huge pages to reserve beyond the size of the buffers. fio aligns its buffers and rounds them up to 4
/// MiB, and it aborts if there are too few pages.
const PAGES_MORE: u64 = 4;

/// Huge pages for fio, in a hugetlbfs. Only root can mount a hugetlbfs. Dropping `Huge` unmounts the hugetlbfs and
/// restores the number of huge pages.
pub(crate) struct Huge {
    mounted: std::path::PathBuf,
    pages_before: String,
}

impl Huge {
    /// Reserves huge pages of 2 MiB for `depth` blocks of 1 MiB, and mounts a hugetlbfs in `folder`. If this fails,
    /// returns the reason as a text.
    pub(crate) fn new(folder: &Path, depth: usize) -> Result<Self, String> {
        let said = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
        let pages_before = std::fs::read_to_string(HUGE_PAGES).map_err(|error| said(HUGE_PAGES, &error))?;
        let before: u64 = pages_before.trim().parse().map_err(|error| said(HUGE_PAGES, &error))?;
        let pages = depth.div_ceil(2) as u64 + PAGES_MORE;
        let mounted = folder.join("huge");
        std::fs::create_dir(&mounted).map_err(|error| said("cannot create a folder for huge pages", &error))?;
        std::fs::write(HUGE_PAGES, (before + pages).to_string()).map_err(|error| said(HUGE_PAGES, &error))?;
        let huge = Self { mounted, pages_before };
        let done = Command::new("mount").args(["-t", "hugetlbfs", "none"]).arg(&huge.mounted).output();
        match done {
            Ok(done) if done.status.success() => Ok(huge),
            Ok(done) => Err(String::from_utf8_lossy(&done.stderr).trim().into()),
            Err(error) => Err(said("mount", &error)),
        }
    }

    fn option(&self) -> String {
        format!("--iomem=mmaphuge:{}", self.mounted.join("fio").display())
    }
}

impl Drop for Huge {
    fn drop(&mut self) {
        // The benchmark's result does not depend on these clean-ups, so their errors are ignored.
        drop(Command::new("umount").arg(&self.mounted).output());
        drop(std::fs::write(HUGE_PAGES, &self.pages_before));
    }
}

/// Returns the seconds that fio needs to move `bytes` bytes in a range of a file. Of each `all` operations, `read`
/// operations are reads. Returns `None` if fio is not installed.
pub(crate) fn seconds(
    (path, (start, length)): (&Path, (usize, usize)),
    bytes: usize,
    (read, all): (usize, usize),
    depth: usize,
    huge: Option<&Huge>,
) -> Outcome<Option<f64>> {
    let memory = huge.map_or_else(|| "--iomem=malloc".into(), Huge::option);
    let done = Command::new("fio")
        .args(["--name=mixed", "--rw=rw", "--bs=1M", "--ioengine=io_uring", "--direct=1", "--overwrite=1"])
        .args(["--output-format=terse", "--terse-version=3"])
        .args([format!("--rwmixread={}", (read * 100).div_euclid(all)), format!("--iodepth={depth}"), memory])
        .args([format!("--offset={start}"), format!("--size={length}"), format!("--io_size={bytes}")])
        .arg(format!("--filename={}", path.display()))
        .output();
    let done = match done {
        Ok(done) => done,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let text = String::from_utf8(done.stdout)?;
    let line = text
        .lines()
        .find(|line| line.starts_with("3;"))
        .ok_or("fio printed no result: run it by hand, or set MEMASCEND_BENCH_FIO=no")?;
    if !done.status.success() {
        return Err(format!("fio failed: {}", String::from_utf8_lossy(&done.stderr)).into());
    }
    // Counted from 0, field 5 is the number of KiB that fio read, and field 46 the number of KiB that it wrote. Fields
    // 8 and 49 are the milliseconds of the reads and of the writes.
    let fields: Vec<&str> = line.split(';').collect();
    let of = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).ok_or("no number from fio");
    let (moved, longest) = ((of(5)? + of(46)?) * 1024.0, of(8)?.max(of(49)?) / 1e3);
    // fio moves whole blocks, so it can move more than `bytes` bytes. The result is the time of fio, scaled down to
    // `bytes` bytes.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    Ok(Some(longest * bytes as f64 / moved))
}
