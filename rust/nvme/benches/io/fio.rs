//! Runs fio on the benchmark's files or devices, with huge pages if they can be reserved.

use std::{error::Error, fs, path::PathBuf, process::Command};

use crate::{Sample, target::MARK, wishes::Pattern};

const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Runs fio. Dropping this value restores the number of reserved huge pages.
pub(crate) struct Fio {
    before: Option<usize>,
}

impl Fio {
    /// Reserves huge pages for buffers of `nbytes` in total. If this fails, fio uses pages of 4 KiB, and `name` says
    /// so. Returns an error if fio cannot be run.
    pub(crate) fn new(nbytes: usize) -> Result<Self, Box<dyn Error>> {
        Command::new("fio").arg("--version").output().map_err(|_| "cannot run fio: apt-get install fio")?;
        let count = || fs::read_to_string(HUGE_PAGES).ok()?.trim().parse::<usize>().ok();
        // fio rounds its buffers up, so it needs a few more pages.
        let wanted = nbytes.div_ceil(HUGE_PAGE_BYTES) + 4;
        let before = count().filter(|before| {
            let asked = fs::write(HUGE_PAGES, (before + wanted).to_string()).is_ok();
            let got = asked && count().is_some_and(|now| now >= before + wanted);
            if asked && !got {
                drop(fs::write(HUGE_PAGES, before.to_string()));
            }
            got
        });
        Ok(Self { before })
    }

    pub(crate) fn name(&self) -> &'static str {
        if self.before.is_some() { "fio, huge pages" } else { "fio, 4 KiB pages" }
    }

    /// Runs one pass of fio, which moves `nbytes` in total over all paths.
    pub(crate) fn run(
        &self,
        paths: &[PathBuf],
        pattern: Pattern,
        (block, depth): (usize, usize),
        nbytes: u64,
    ) -> Result<Sample, Box<dyn Error>> {
        let names: Vec<_> = paths.iter().map(|path| path.display().to_string().replace(':', "\\:")).collect();
        let mut command = Command::new("fio");
        command.args([
            "--name=peer",
            "--ioengine=io_uring",
            "--direct=1",
            "--output-format=terse",
            "--terse-version=3",
        ]);
        command.arg(format!("--filename={}", names.join(":")));
        command.arg(format!("--rw={}", if pattern == Pattern::Mixed { "rw" } else { pattern.name() }));
        command.args([format!("--bs={block}"), format!("--iodepth={depth}"), format!("--size={nbytes}")]);
        command.arg(format!("--buffer_pattern=\"{}\"", MARK.escape_ascii()));
        if self.before.is_some() {
            command.arg("--iomem=shmhuge");
        }
        let done = command.output()?;
        let said = String::from_utf8_lossy(&done.stdout);
        if !done.status.success() {
            return Err(format!("fio failed: {}{said}", String::from_utf8_lossy(&done.stderr)).into());
        }
        let line = said
            .lines()
            .find(|line| line.starts_with("3;"))
            .ok_or("fio printed no result: run it by hand, or omit --fio")?;
        parsed(&line.split(';').collect::<Vec<_>>())
    }
}

impl Drop for Fio {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            drop(fs::write(HUGE_PAGES, before.to_string()));
        }
    }
}

/// Parses a line that fio printed in terse format 3. From the sixth field on, the line has 41 fields about reads and 41
/// fields about writes. The processor time comes next.
fn parsed(fields: &[&str]) -> Result<Sample, Box<dyn Error>> {
    let number = |index: usize| -> Result<f64, Box<dyn Error>> {
        let field = fields.get(index).ok_or("fio's line is too short")?;
        Ok(field.trim_end_matches('%').parse()?)
    };
    let [mut kib, mut milliseconds, mut sum, mut count, mut slowest] = [0.0_f64; 5];
    for start in [5, 46] {
        let moved = number(start)?;
        if moved > 0.0 {
            let requests = number(start + 2)? * number(start + 3)? / 1e3;
            kib += moved;
            milliseconds = milliseconds.max(number(start + 3)?);
            sum += number(start + 34)? * requests;
            count += requests;
            let percentile = |field: &&&str| field.starts_with("99.000000%=");
            let field =
                fields[start + 12..start + 32].iter().find(percentile).ok_or("fio printed no 99th percentile")?;
            slowest = slowest.max(field["99.000000%=".len()..].parse()?);
        }
    }
    let gigabytes = kib * 1024.0 / 1e9;
    let seconds = milliseconds / 1e3;
    Ok(Sample {
        speed: gigabytes / seconds,
        cpu: (number(87)? + number(88)?) / 100.0 * seconds * 1e3 / gigabytes,
        latency: sum / count / 1e3,
        slowest: slowest / 1e3,
    })
}
