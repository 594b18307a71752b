//! The ring backend: one thread owns an `io_uring`. Callers put jobs into a queue and wake the thread with an eventfd.
//!
//! The thread only submits requests and reaps completions, so the computation of a caller never delays a submission. A
//! ring that only one thread uses can run its task work in that thread (`SINGLE_ISSUER`, `DEFER_TASKRUN`).

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::{Arc, Mutex, mpsc},
    thread::JoinHandle,
};

use io_uring::{IoUring, Probe, opcode, squeue, types};
use memascend_mem::locked;
use rustix::event::{EventfdFlags, eventfd};

use crate::{
    backend::{Backend, block_signals},
    device::Device,
    fork::ForkGuard,
    operation::Kind,
    request::{Job, Jobs, NextStep, PAUSE, Request},
};

/// Requests of this size or more are submitted one at a time. The kernel's I/O scheduler merges adjacent requests that
/// are submitted together: a queue of 8 requests of 1 MiB becomes a queue of 3, which costs 10 % of the bandwidth
/// (measured). One system call for each request costs little at this size.
const ALONE_BYTES: usize = 256 << 10;
/// The `user_data` of the eventfd's read; a request's `user_data` is its index in `places`.
const WAKE_MARK: u64 = u64::MAX;

pub(crate) struct Uring {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

/// The state that callers and the ring thread share.
struct Inbox {
    queue: Mutex<Queue>,
    /// `_wake_fork_guard` drops before `wake` closes the descriptor.
    _wake_fork_guard: ForkGuard,
    wake: OwnedFd,
}

#[derive(Default)]
struct Queue {
    jobs: Jobs,
    /// True if the ring thread found `jobs` empty. The thread may be asleep, so `submit` must wake it.
    asleep: bool,
    stop: bool,
}

impl Uring {
    /// Starts the ring thread. The error says why the ring is not available.
    pub(crate) fn start(devices: &Arc<[Device]>, queue_depth: usize) -> Result<Self, String> {
        let no_thread = |error: io::Error| format!("its thread or eventfd could not be created: {error}");
        let wake = eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| no_thread(errno.into()))?;
        let fork_guard = ForkGuard::new(wake.as_fd());
        let inbox = Arc::new(Inbox { queue: Mutex::default(), wake, _wake_fork_guard: fork_guard });
        let (began, begins) = mpsc::sync_channel(1);
        let theirs = Arc::clone(&inbox);
        let devices = Arc::clone(devices);
        let thread = std::thread::Builder::new().name("memascend-io".into());
        let depth = queue_depth * devices.len();
        let run = move || {
            block_signals();
            // The kernel ties a ring with `SINGLE_ISSUER` to the thread that makes it.
            match Driver::new(&theirs, &devices, depth) {
                Ok(mut driver) => {
                    drop(began.send(Ok(())));
                    driver.run();
                }
                Err(error) => drop(began.send(Err(error))),
            }
        };
        let thread = thread.spawn(run).map_err(no_thread)?;
        match begins.recv() {
            Ok(Ok(())) => Ok(Self { inbox, thread: Some(thread) }),
            Ok(Err(error)) => Err(refused(&error)),
            Err(mpsc::RecvError) => Err("its thread ended at once".into()),
        }
    }
}

/// Returns why `io_uring` is not available, or `None` if it is available. Makes a small ring as a test, and drops the
/// ring.
#[must_use]
pub fn why_no_io_uring() -> Option<String> {
    make(2).err().map(|error| refused(&error))
}

/// Makes a ring, and checks that the kernel supports reads, writes and flushes through rings. With the flags of
/// `tuned`, the kernel rarely interrupts the ring thread.
fn make(entries: u32) -> io::Result<IoUring> {
    let tuned = IoUring::builder().setup_single_issuer().setup_defer_taskrun().setup_clamp().build(entries);
    let ring = match tuned {
        // Linux before 6.1 does not know the flags.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries)?,
        ring => ring?,
    };
    let mut probe = Probe::new();
    let known = ring.submitter().register_probe(&mut probe).is_ok()
        && [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE].iter().all(|code| probe.is_supported(*code));
    if known { Ok(ring) } else { Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)) }
}

fn refused(error: &io::Error) -> String {
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    match (error.raw_os_error(), disabled.trim()) {
        (Some(libc::EPERM), "1" | "2") => {
            "the kernel forbids io_uring; set the sysctl kernel.io_uring_disabled to 0".to_owned()
        }
        (Some(libc::EPERM | libc::EACCES), _) => {
            "this process may not use io_uring, probably because of a seccomp filter such as Docker's default profile; \
             allow io_uring_setup, io_uring_enter and io_uring_register in the filter"
                .into()
        }
        (Some(libc::ENOSYS), _) => "this kernel has none (Linux 5.6 is needed), or a seccomp filter hides it".into(),
        (Some(libc::EOPNOTSUPP), _) => "the io_uring of this kernel is too old; Linux 5.6 is needed".into(),
        (Some(libc::EMFILE | libc::ENFILE), _) => "no file descriptor is left; raise `ulimit -n`".into(),
        (Some(libc::ENOMEM), _) => {
            "the kernel has no memory for the ring; before Linux 5.12 it counts as locked memory, so raise `ulimit -l`"
                .into()
        }
        _ => format!("io_uring_setup failed: {error}"),
    }
}

impl Inbox {
    fn wake(&self) {
        let written = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        // The write does not fail. It would block only if 2^64 - 2 wakes were unread.
        debug_assert_eq!(written, Ok(8));
    }
}

impl Backend for Uring {
    fn submit(&self, job: Job) {
        let mut queue = locked(&self.inbox.queue);
        queue.jobs.push(job);
        let asleep = std::mem::take(&mut queue.asleep);
        drop(queue);
        if asleep {
            self.inbox.wake();
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        locked(&self.inbox.queue).stop = true;
        self.inbox.wake();
        if let Some(thread) = self.thread.take() {
            // The thread never unwinds: see `AbortOnPanic`.
            drop(thread.join());
        }
    }
}

/// Aborts the process if the ring thread panics. Unwinding would drop requests while the kernel still writes to their
/// memory.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// The ring thread's state.
struct Driver<'a> {
    inbox: &'a Inbox,
    /// `_ring_fork_guard` drops before `ring` closes the descriptor.
    _ring_fork_guard: ForkGuard,
    ring: IoUring,
    /// The ring uses the descriptors of the devices and does not register the files. The kernel tears down the ring of
    /// a killed process some time after the end of the process. Until then, registered files would stay open and
    /// locked.
    devices: &'a [Device],
    /// Requests that the kernel has. A request's index is its `user_data`.
    places: Box<[Option<Request>]>,
    free: Vec<usize>,
    /// Requests to submit again.
    again: Vec<Request>,
    /// The memory that the read of the eventfd writes to.
    wakes: Box<u64>,
    /// True while the kernel has a pending read of the eventfd.
    listening: bool,
}

impl<'a> Driver<'a> {
    fn new(inbox: &'a Inbox, devices: &'a [Device], depth: usize) -> io::Result<Self> {
        // The ring has one entry more than `depth`, for the eventfd. The completion queue has twice as many entries as
        // the ring, so it never overflows.
        let entries = u32::try_from(depth + 1).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        let ring = make(entries)?;
        // SAFETY: `ring` keeps its descriptor open during this call.
        let fork_guard = ForkGuard::new(unsafe { std::os::fd::BorrowedFd::borrow_raw(ring.as_raw_fd()) });
        Ok(Self {
            inbox,
            ring,
            _ring_fork_guard: fork_guard,
            devices,
            places: std::iter::repeat_with(|| None).take(depth).collect(),
            free: (0..depth).rev().collect(),
            again: Vec::with_capacity(depth),
            wakes: Box::new(0),
            listening: false,
        })
    }

    fn run(&mut self) {
        let _abort = AbortOnPanic;
        loop {
            let stop = self.collect();
            if stop && self.free.len() == self.places.len() && !self.listening {
                return;
            }
            self.enter();
            self.reap();
        }
    }

    /// Puts requests of the callers' jobs into the ring until all places are taken. If no job is left, adds a read of
    /// the eventfd, unless the thread should stop. Returns true if the thread should stop.
    fn collect(&mut self) -> bool {
        loop {
            self.fill();
            let mut queue = locked(&self.inbox.queue);
            if self.free.is_empty() {
                // All places are taken. The next completion frees a place, and `run` calls `collect` again.
                return queue.stop;
            }
            if queue.jobs.is_empty() {
                queue.asleep = true;
                let stop = queue.stop;
                drop(queue);
                if !stop {
                    self.listen();
                }
                return stop;
            }
        }
    }

    /// Puts a read of the eventfd into the ring, unless one is pending, so that a wake-up arrives as a completion.
    fn listen(&mut self) {
        if !self.listening {
            self.listening = true;
            let read = opcode::Read::new(types::Fd(self.inbox.wake.as_raw_fd()), (&raw mut *self.wakes).cast(), 8);
            self.push(&read.build().user_data(WAKE_MARK));
        }
    }

    /// Puts requests into the ring until all places are taken or no request waits. Submits each large request at once.
    fn fill(&mut self) {
        while let Some(&mark) = self.free.last() {
            let Some(request) = self.again.pop().or_else(|| self.next_request()) else { return };
            let file = types::Fd(self.devices[request.device].descriptor());
            let entry = build(&request, file).user_data(mark as u64);
            let alone = request.bytes >= ALONE_BYTES;
            self.free.pop();
            // The request is in `places` before the kernel can complete it.
            self.places[mark] = Some(request);
            self.push(&entry);
            if alone {
                // A failed submission leaves the entry in the queue; `enter` submits it again and handles the error.
                drop(self.ring.submit());
            }
        }
    }

    /// Takes the next request. `fill` calls `next_request` only when a place is free. So a first-lane request that
    /// arrives while all places are taken goes before all waiting requests of the second lane.
    fn next_request(&self) -> Option<Request> {
        locked(&self.inbox.queue).jobs.next_request()
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the entry's memory is `wakes`, or memory that stays valid until a request in `places` is answered.
        // Both outlive the completion, because `run` returns only once the kernel has no request and no eventfd read.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            // The submission queue has one entry for each place and one for the eventfd. So the queue is full only
            // while the kernel has not yet taken the entries.
            if self.ring.submit().is_err() {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Submits requests and waits for a completion. May return without a completion if the system call fails. `run`
    /// then calls `enter` again.
    fn enter(&mut self) {
        if let Err(error) = self.ring.submit_and_wait(1) {
            match error.raw_os_error() {
                // EBUSY: completions must be reaped first.
                Some(libc::EINTR | libc::EBUSY) => {}
                // After EAGAIN, ENOMEM and other errors, the ring still has every entry: pause and retry.
                _ => std::thread::sleep(PAUSE),
            }
        }
    }

    fn reap(&mut self) {
        let mut pause = false;
        // `reap` copies each entry and releases the queue, because `fill` below may submit.
        loop {
            let Some(entry) = self.ring.completion().next() else { break };
            let result = entry.result();
            if entry.user_data() == WAKE_MARK {
                self.listening = false;
                continue;
            }
            let Ok(mark) = usize::try_from(entry.user_data()) else { continue };
            let Some(mut request) = self.places.get_mut(mark).and_then(Option::take) else { continue };
            self.free.push(mark);
            // `fill` sends the next request first, so that the device works while `interpret_result` wakes the waiter.
            self.fill();
            // A negative result is an error number.
            let answer = usize::try_from(result).map_err(|_| -result);
            if let NextStep::Again { pause: slowly } = request.interpret_result(answer) {
                pause |= slowly;
                self.again.push(request);
            }
        }
        if pause {
            std::thread::sleep(PAUSE);
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a request has at most REQUEST_BYTES_MAX")]
fn build(request: &Request, file: types::Fd) -> squeue::Entry {
    let (address, bytes) = (request.address.0, request.bytes as u32);
    match request.kind {
        Kind::Read => opcode::Read::new(file, address, bytes).offset(request.offset).build(),
        Kind::Write { durable } => {
            let flags = if durable { libc::RWF_DSYNC } else { 0 };
            opcode::Write::new(file, address, bytes).offset(request.offset).rw_flags(flags).build()
        }
        Kind::Flush => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
    }
}
