//! Parses the command line: the blocks, depths, backends, patterns and paths to measure.

use std::{error::Error, path::PathBuf};

use memascend_nvme::BackendChoice;

pub(crate) const HELP: &str = "\
cargo bench -p memascend-nvme --bench io -- [OPTIONS]
  --block BYTES,...    bytes of a request (1MiB)
  --depth N,...        requests in flight (8)
  --pattern P,...      read, write, mixed (all three)
  --backend B,...      ring, threads
  --path PATH          a folder, a file that does not exist, or an empty raw device; repeat it for stripes
                       (MEMASCEND_BENCH_DIR, or the system's temporary folder)
  --bytes BYTES        bytes of one pass (1GiB)
  --rounds N           rounds (5); each round runs every pass once, and medians are shown
  --fio                also run fio, with huge pages if they can be reserved, and show the ratio ours / fio
Without --backend and --path, measures ring, threads, two files and unaligned memory, and compares each with ring.";

/// The kind of transfers in a pass.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pattern {
    Read,
    Write,
    /// Reads and writes alternate.
    Mixed,
}

impl Pattern {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Mixed => "mixed",
        }
    }
}

/// The parsed command line.
pub(crate) struct Wishes {
    pub(crate) blocks: Vec<usize>,
    pub(crate) depths: Vec<usize>,
    pub(crate) patterns: Vec<Pattern>,
    pub(crate) backends: Vec<BackendChoice>,
    pub(crate) paths: Vec<PathBuf>,
    pub(crate) nbytes: u64,
    pub(crate) rounds: usize,
    pub(crate) fio: bool,
}

impl Wishes {
    /// Parses the arguments. Returns `None` if the user asked for help.
    pub(crate) fn read(words: impl Iterator<Item = String>) -> Result<Option<Self>, Box<dyn Error>> {
        let mut wishes = Self {
            blocks: vec![1 << 20],
            depths: vec![8],
            patterns: vec![Pattern::Read, Pattern::Write, Pattern::Mixed],
            backends: Vec::new(),
            paths: Vec::new(),
            nbytes: 1 << 30,
            rounds: 5,
            fio: false,
        };
        let mut words = words;
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            match word.as_str() {
                // `cargo bench` passes `--bench` to every benchmark.
                "--bench" => {}
                "--help" | "-h" => return Ok(None),
                "--fio" => wishes.fio = true,
                "--block" => wishes.blocks = each(&value()?, block)?,
                "--depth" => wishes.depths = each(&value()?, number)?,
                "--pattern" => wishes.patterns = each(&value()?, pattern)?,
                "--backend" => wishes.backends = each(&value()?, backend)?,
                "--path" => wishes.paths.push(value()?.into()),
                "--bytes" => wishes.nbytes = bytes(&value()?)?,
                "--rounds" => wishes.rounds = number(&value()?)?,
                _ => return Err(format!("{word} is not an option\n{HELP}").into()),
            }
        }
        if let Some(large) = wishes.blocks.iter().find(|block| **block as u64 > wishes.nbytes) {
            return Err(
                format!("--block {large} is larger than --bytes {}: pass a smaller block", wishes.nbytes).into()
            );
        }
        Ok(Some(wishes))
    }
}

fn each<T>(list: &str, one: impl Fn(&str) -> Result<T, Box<dyn Error>>) -> Result<Vec<T>, Box<dyn Error>> {
    list.split(',').map(one).collect()
}

fn number(word: &str) -> Result<usize, Box<dyn Error>> {
    let number = word.parse().map_err(|_| format!("{word:?} is not a number"))?;
    if number == 0 { Err("0 is too small: pass at least 1".into()) } else { Ok(number) }
}

fn bytes(word: &str) -> Result<u64, Box<dyn Error>> {
    let digits = word.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match &word[digits.len()..] {
        "" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        unit => return Err(format!("{unit:?} is not KiB, MiB or GiB").into()),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{word:?} is not a number of bytes, such as 1MiB"))?;
    number
        .checked_mul(1 << shift)
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| format!("{word} is zero or too large: pass a size such as 1MiB").into())
}

fn block(word: &str) -> Result<usize, Box<dyn Error>> {
    let bytes = usize::try_from(bytes(word)?)?;
    if bytes.is_multiple_of(4096) { Ok(bytes) } else { Err(format!("--block {word}: pass a multiple of 4 KiB").into()) }
}

fn pattern(word: &str) -> Result<Pattern, Box<dyn Error>> {
    [Pattern::Read, Pattern::Write, Pattern::Mixed]
        .into_iter()
        .find(|pattern| pattern.name() == word)
        .ok_or_else(|| format!("{word:?} is not read, write or mixed").into())
}

fn backend(word: &str) -> Result<BackendChoice, Box<dyn Error>> {
    match word {
        "ring" => Ok(BackendChoice::IoUring),
        "threads" => Ok(BackendChoice::Threads),
        _ => Err(format!("{word:?} is not ring or threads").into()),
    }
}
