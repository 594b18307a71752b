//! The thread backend: a few threads call `preadv`, `pwritev`, `pwritev2` and `fdatasync`. It serves a volume if
//! `io_uring` is not available, or if the caller chose threads.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::JoinHandle,
};

use memascend_mem::Guarded;

use crate::{
    backend::{Backend, block_signals},
    device::Device,
    operation::Kind,
    request::{Job, Jobs, NextStep, PAUSE, Request},
};

/// The largest number of threads for one device. Four threads with requests of 1 MiB reach the bandwidth of `io_uring`.
/// Each thread waits in the kernel most of the time.
const THREADS_ONE_DEVICE: usize = 4;
/// The largest number of threads that serve several devices together. Each device needs a few requests at a time.
const THREADS_SEVERAL_DEVICES: usize = 8;

pub(crate) struct Threads {
    queue: Arc<Guarded<Queue>>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Queue {
    jobs: Jobs,
    stop: bool,
}

impl Threads {
    pub(crate) fn start(devices: &Arc<[Device]>, queue_depth: usize) -> io::Result<Self> {
        let most = if devices.len() == 1 { THREADS_ONE_DEVICE } else { THREADS_SEVERAL_DEVICES };
        let mut pool = Self { queue: Arc::default(), threads: Vec::new() };
        for index in 0..most.min(queue_depth * devices.len()) {
            let (queue, devices) = (Arc::clone(&pool.queue), Arc::clone(devices));
            let thread = std::thread::Builder::new().name(format!("memascend-io-{index}"));
            // A panic drops the request that caused the panic, and `Request::drop` answers this request with an error.
            // Then the thread serves the other requests.
            let served = move || while catch_unwind(AssertUnwindSafe(|| serve(&queue, &devices))).is_err() {};
            pool.threads.push(thread.spawn(served)?);
        }
        Ok(pool)
    }
}

impl Backend for Threads {
    fn submit(&self, job: Job) {
        self.queue.lock().jobs.push(job);
        // A job may have requests for several threads. A thread that takes a request wakes another thread if the queue
        // is not empty.
        self.queue.notify_one();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.queue.lock().stop = true;
        self.queue.notify_all();
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

fn serve(queue: &Guarded<Queue>, devices: &[Device]) {
    block_signals();
    let mut waiting = queue.lock();
    loop {
        if let Some(mut request) = waiting.jobs.next_request() {
            let more = !waiting.jobs.is_empty();
            drop(waiting);
            if more {
                queue.notify_one();
            }
            while let NextStep::Again { pause } = request.interpret_result(perform(&request, &devices[request.device]))
            {
                if pause {
                    std::thread::sleep(PAUSE);
                }
            }
            drop(request);
            waiting = queue.lock();
        } else if waiting.stop {
            return;
        } else {
            waiting = queue.sleep(waiting);
        }
    }
}

fn perform(request: &Request, device: &Device) -> Result<usize, i32> {
    let descriptor = device.descriptor();
    let place = libc::iovec { iov_base: request.address.0.cast(), iov_len: request.bytes };
    let offset = i64::try_from(request.offset).map_err(|_| libc::EFBIG)?;
    let moved = match request.kind {
        // SAFETY: `request.bytes` bytes at `request.address` stay valid until this request is answered. They are in a
        // caller's buffer, which an operation owns, or in the chunk of a copy thread that waits for this transfer.
        Kind::Read => unsafe { libc::preadv(descriptor, &raw const place, 1, offset) },
        // SAFETY: the bytes stay valid, as for `preadv`.
        Kind::Write { durable: false } => unsafe { libc::pwritev(descriptor, &raw const place, 1, offset) },
        Kind::Write { durable: true } => {
            // SAFETY: the bytes stay valid, as for `preadv`.
            unsafe { libc::pwritev2(descriptor, &raw const place, 1, offset, libc::RWF_DSYNC) }
        }
        // SAFETY: `fdatasync` takes no pointer.
        Kind::Flush => unsafe { libc::fdatasync(descriptor) as isize },
    };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}
