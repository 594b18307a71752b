//! Writes traces of events by thread, for Perfetto (ui.perfetto.dev) or `chrome://tracing`.
//!
//! Off, it costs one relaxed load for each thing that could be told. On, events go through one buffer of fixed size to
//! the file, some 150 bytes each. A trace that was cut short, because its process was killed, can be opened all the same.

use std::{
    fmt::Write as _,
    fs::{File, OpenOptions},
    io::{self, BufWriter, Write},
    mem::ManuallyDrop,
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use memascend_mem::locked;

use crate::{
    Error, Result,
    fork::{NotInChildren, Owned},
};

/// What waits to be written to the file.
const BUFFER_BYTES: usize = 64 << 10;
/// Threads whose names are remembered as written; past it they are written again.
const THREADS_MAX: usize = 1024;

/// A recorder of events, on or off.
#[derive(Debug)]
pub struct Trace {
    on: AtomicBool,
    owned: Owned,
    sink: Mutex<Option<Sink>>,
}

/// Dropping it closes the list of events, as well as can be.
#[derive(Debug)]
struct Sink {
    owned: Owned,
    // Dropped by hand, in this order: the number leaves the table before it can be given to another file.
    not_in_children: ManuallyDrop<NotInChildren>,
    file: ManuallyDrop<BufWriter<File>>,
    path: Arc<Path>,
    began: Instant,
    threads: Vec<i32>,
    line: String,
    operations: u64,
    closed: bool,
    failed: Option<io::Error>,
}

impl Trace {
    pub(crate) fn new() -> Self {
        Self { on: AtomicBool::new(false), owned: Owned::here(), sink: Mutex::default() }
    }

    /// Whether events are recorded.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Now, if events are recorded.
    #[must_use]
    pub fn mark(&self) -> Option<Instant> {
        self.is_on().then(Instant::now)
    }

    /// Begins to record into a new file, which nobody but its owner may read.
    pub fn begin(&self, path: &Path) -> Result<()> {
        self.owned.check()?;
        let mut sink = locked(&self.sink);
        if sink.is_some() {
            return Err(Error::Invalid("a trace is being recorded already; end it first".into()));
        }
        let path: Arc<Path> = path.into();
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|error| Error::system(&path, "open", &error))?;
        let mut file = BufWriter::with_capacity(BUFFER_BYTES, file);
        // An event after another begins with a comma, so the first is one that says nothing.
        let first = format!(r#"[{{"ph":"M","name":"process_name","pid":{},"args":{{"name":"memascend"}}}}"#, pid());
        file.write_all(first.as_bytes()).map_err(|error| Error::system(&path, "write", &error))?;
        let not_in_children = ManuallyDrop::new(NotInChildren::new(file.get_ref().as_fd()));
        *sink = Some(Sink {
            owned: self.owned,
            not_in_children,
            file: ManuallyDrop::new(file),
            path,
            began: Instant::now(),
            threads: Vec::new(),
            line: String::new(),
            operations: 0,
            closed: false,
            failed: None,
        });
        self.on.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Ends the file. Nothing happens where none was begun.
    pub fn end(&self) -> Result<()> {
        self.owned.check()?;
        self.on.store(false, Ordering::Relaxed);
        let Some(mut sink) = locked(&self.sink).take() else { return Ok(()) };
        sink.close();
        match sink.failed.take() {
            Some(error) => Err(Error::system(&sink.path, "write", &error)),
            None => Ok(()),
        }
    }

    /// Something that this thread did from `began` to `ended`, to or for `of`.
    pub fn span(&self, name: &'static str, of: &str, began: Instant, ended: Instant) {
        if self.is_on() {
            self.record(|sink, thread| sink.span(thread, name, of, (began, ended)));
        }
    }

    /// As [`span`](Self::span), from a [`mark`](Self::mark) until now.
    pub fn since(&self, mark: Option<Instant>, name: &'static str, of: &str) {
        if let Some(began) = mark {
            self.span(name, of, began, Instant::now());
        }
    }

    /// An operation of the devices from `began` until now; such overlap.
    pub(crate) fn operation(&self, name: &'static str, began: Option<Instant>, (offset, bytes): (u64, u64)) {
        if let Some(began) = began {
            self.record(|sink, thread| sink.operation(thread, name, (began, Instant::now()), (offset, bytes)));
        }
    }

    fn record(&self, write: impl FnOnce(&mut Sink, i32)) {
        // In a forked child the lock may have been copied in the middle of a hold.
        if self.owned.elsewhere() {
            return;
        }
        if let Some(sink) = &mut *locked(&self.sink) {
            // SAFETY: gettid has no preconditions.
            let thread = unsafe { libc::gettid() };
            sink.name(thread);
            write(sink, thread);
        }
    }
}

impl Sink {
    /// Writes a thread's name, the first time that it is heard of.
    fn name(&mut self, thread: i32) {
        if self.threads.contains(&thread) {
            return;
        }
        if self.threads.len() == THREADS_MAX {
            self.threads.clear();
        }
        self.threads.push(thread);
        let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap_or_default();
        let name = escaped(name.trim_end());
        self.put(format_args!(
            r#"{{"ph":"M","name":"thread_name","pid":{},"tid":{thread},"args":{{"name":"{name}"}}}}"#,
            pid()
        ));
    }

    fn span(&mut self, thread: i32, name: &str, of: &str, (began, ended): (Instant, Instant)) {
        let (start, duration) = (self.microseconds(began), microseconds(ended.saturating_duration_since(began)));
        let (pid, of) = (pid(), escaped(of));
        self.put(format_args!(
            r#"{{"ph":"X","name":"{name}","pid":{pid},"tid":{thread},"ts":{start:.3},"dur":{duration:.3},"args":{{"of":"{of}"}}}}"#
        ));
    }

    fn operation(&mut self, thread: i32, name: &str, times: (Instant, Instant), (offset, bytes): (u64, u64)) {
        self.operations += 1;
        let (id, pid) = (self.operations, pid());
        let (start, end) = (self.microseconds(times.0), self.microseconds(times.1));
        self.put(format_args!(
            r#"{{"ph":"b","cat":"storage","id":{id},"name":"{name}","pid":{pid},"tid":{thread},"ts":{start:.3},"args":{{"offset":{offset},"bytes":{bytes}}}}}"#
        ));
        self.put(format_args!(
            r#"{{"ph":"e","cat":"storage","id":{id},"name":"{name}","pid":{pid},"tid":{thread},"ts":{end:.3}}}"#
        ));
    }

    /// Since the trace began; what began before it began with it.
    fn microseconds(&self, at: Instant) -> f64 {
        microseconds(at.saturating_duration_since(self.began))
    }

    fn put(&mut self, event: std::fmt::Arguments<'_>) {
        if self.failed.is_some() {
            return;
        }
        self.line.clear();
        let _ = write!(self.line, ",\n{event}");
        if let Err(error) = self.file.write_all(self.line.as_bytes()) {
            self.failed = Some(error);
        }
    }

    fn close(&mut self) {
        if self.failed.is_none()
            && !std::mem::replace(&mut self.closed, true)
            && let Err(error) = self.file.write_all(b"]\n").and_then(|()| self.file.flush())
        {
            self.failed = Some(error);
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if self.owned.elsewhere() {
            // The parent's: its descriptor is closed here already, and what waits in the buffer is the parent's to write.
            return;
        }
        self.close();
        // SAFETY: dropped once, here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.not_in_children) };
        // SAFETY: as above.
        unsafe { ManuallyDrop::drop(&mut self.file) };
    }
}

fn pid() -> u32 {
    std::process::id()
}

fn microseconds(time: std::time::Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Text inside the quotes of JSON.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '"' | '\\' => out.extend(['\\', char]),
            char if char.is_control() => {
                let _ = write!(out, "\\u{:04x}", u32::from(char));
            }
            char => out.push(char),
        }
    }
    out
}
