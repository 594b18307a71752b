//! Measures the speed of the kernels. Most groups compare it with the speed of a loop that only moves the same bytes.
//!
//! `cargo bench -p memascend-math -- [MILLIONS] [WORD]` runs the benchmark. MILLIONS is the number of elements, in Mi
//! (default 64). With WORD, a group runs only if the name of one of its cases contains WORD. Each round runs every case
//! of a group once, and the benchmark prints medians over the rounds. Buffers are on huge pages if the system provides
//! them.

use std::{hint::black_box, num::NonZeroUsize, time::Instant};

use memascend_math::{
    AdamState, Bf16, Codes, CompactState, Exec, F16, Floats, FloatsMut, Hyperparameters, Moments, Position, Reduced,
    Result, Rule, Scalars, Simd, Weights, adam, adam_compact, check, check_and_unscale, update,
};

mod memory;
use memory::Buffer;

const ROUNDS: usize = 9;
/// The number of elements in a chunk. The cases of the last group call a kernel once per chunk, as the engine does.
const CHUNK: usize = 65_536;

/// Cases that the benchmark compares: it prints the speed of each case relative to the first case of the group. The
/// column GB/s counts `bytes_per_element` for every case.
struct Group {
    bytes_per_element: usize,
    cases: &'static [(&'static str, Case)],
}

type Case = fn(&mut Data, Exec, usize);

const GROUPS: &[Group] = &[
    Group {
        bytes_per_element: 4,
        cases: &[
            ("read 4 B", |d, _, threads| memory::read(&d.p, threads)),
            ("check f32", |d, exec, _| _ = black_box(check(Floats::F32(&d.p), exec))),
        ],
    },
    Group {
        bytes_per_element: 2,
        cases: &[
            ("read 2 B", |d, _, threads| memory::read(&d.grad, threads)),
            ("check bf16", |d, exec, _| _ = black_box(check(Floats::Bf16(&d.grad), exec))),
            ("check f16", |d, exec, _| _ = black_box(check(Floats::F16(&d.half), exec))),
            // The values of `d.wide` have exponents that are too far apart for one exact float64 sum per lane. Real
            // gradients often need more than one sum, too.
            ("check bf16, wide range", |d, exec, _| _ = black_box(check(Floats::Bf16(&d.wide), exec))),
            // Shows whether the kernel converts fp16 denormals as fast as other numbers. Arithmetic on fp32 denormals
            // would make the conversion slow on Intel's processors.
            ("check f16, denormals", |d, exec, _| _ = black_box(check(Floats::F16(&d.tiny), exec))),
        ],
    },
    Group {
        bytes_per_element: 8,
        cases: &[
            ("read and write 4 B", |d, _, threads| memory::rewrite(&mut d.w, threads)),
            ("check and unscale f32", |d, exec, _| {
                ok(check_and_unscale(FloatsMut::F32(&mut d.w), 0.999, exec).map(drop));
            }),
        ],
    },
    Group {
        bytes_per_element: 28,
        cases: &[
            ("4 streams read, 4 written", |d, _, threads| {
                memory::streams([&mut d.p, &mut d.m, &mut d.v], &d.grad, &mut d.out, threads);
            }),
            ("adam bf16 to bf16", |d, exec, _| {
                let state = AdamState { master: &mut d.p, exp_avg: &mut d.m, exp_avg_sq: &mut d.v };
                let out = FloatsMut::Bf16(&mut d.out);
                ok(adam(state, Floats::Bf16(&d.grad), Some(out), &d.scalars, exec));
            }),
        ],
    },
    // These cases call a kernel once per chunk, as the engine does. `bytes_per_element` is the traffic of the second
    // case, the compact chunks.
    Group {
        bytes_per_element: 26,
        cases: &[
            ("adam bf16, whole chunks", |d, exec, _| {
                let state = d.p.chunks_mut(CHUNK).zip(d.m.chunks_mut(CHUNK)).zip(d.v.chunks_mut(CHUNK));
                for (((master, exp_avg), exp_avg_sq), (grad, out)) in
                    state.zip(d.grad.chunks(CHUNK).zip(d.out.chunks_mut(CHUNK)))
                {
                    let state = AdamState { master, exp_avg, exp_avg_sq };
                    ok(adam(state, Floats::Bf16(grad), Some(FloatsMut::Bf16(out)), &d.scalars, exec));
                }
            }),
            ("adam bf16, compact chunks", |d, exec, _| {
                let state = d.out.chunks_mut(CHUNK).zip(d.rest.chunks_mut(CHUNK));
                let moments = d.m.chunks_mut(CHUNK).zip(d.v.chunks_mut(CHUNK));
                for (((values, rest), (exp_avg, exp_avg_sq)), grad) in state.zip(moments).zip(d.grad.chunks(CHUNK)) {
                    let state = CompactState { values, rest, exp_avg, exp_avg_sq };
                    ok(adam_compact(state, Floats::Bf16(grad), &d.scalars, exec));
                }
            }),
            ("adam bf16, 16-bit moments", |d, exec, _| {
                let state = d.out.chunks_mut(CHUNK).zip(d.rest.chunks_mut(CHUNK));
                let moments = d.first.chunks_mut(CHUNK).zip(d.second.chunks_mut(CHUNK));
                for (((values, rest), (first, second)), grad) in state.zip(moments).zip(d.grad.chunks(CHUNK)) {
                    let weights = Weights::Compact { values, rest, rounded_up: None };
                    let state = Reduced { weights, moments: Moments::Bf16(first, Some(second)) };
                    ok(update(state, Floats::Bf16(grad), &d.rule, Position::default(), exec));
                }
            }),
            ("adam bf16, 8-bit moments", |d, exec, _| {
                let state = d.out.chunks_mut(CHUNK).zip(d.rest.chunks_mut(CHUNK)).zip(d.up.chunks_mut(CHUNK / 8));
                let first = d.codes.chunks_mut(CHUNK).zip(d.absmax.chunks_mut(CHUNK / 256));
                let second = d.codes_sq.chunks_mut(CHUNK).zip(d.absmax_sq.chunks_mut(CHUNK / 256));
                for (((((values, rest), up), first), second), grad) in
                    state.zip(first).zip(second).zip(d.grad.chunks(CHUNK))
                {
                    let weights = Weights::Compact { values, rest, rounded_up: Some(up) };
                    let of = |(codes, absmax)| Codes { codes, absmax };
                    let state = Reduced { weights, moments: Moments::Blocks(of(first), Some(of(second))) };
                    ok(update(state, Floats::Bf16(grad), &d.rule, Position::default(), exec));
                }
            }),
        ],
    },
];

fn main() {
    let millions = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(64_usize);
    let exec = Exec::new(NonZeroUsize::MIN).unwrap_or_else(|error| panic!("{error}"));
    let mut data = Data::new(millions << 20);
    let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    show(&format!(
        "{millions} Mi elements, medians of {ROUNDS} interleaved rounds; the ratio is to the group's first line"
    ));
    show(&format!("{:26}{:>9}{:>8}{:>10}{:>9}{:>7}", "", "threads", "simd", "Gelem/s", "GB/s", "ratio"));
    let word =
        std::env::args().skip(1).find(|argument| argument.parse::<usize>().is_err() && !argument.starts_with('-'));
    let wanted = |group: &&Group| word.as_ref().is_none_or(|word| group.cases.iter().any(|case| case.0.contains(word)));
    for group in GROUPS.iter().filter(wanted) {
        for threads in if cores == NonZeroUsize::MIN { vec![cores] } else { vec![NonZeroUsize::MIN, cores] } {
            data.compare(group, exec.with_threads(threads), threads.get(), Simd::available()[0]);
        }
        for simd in Simd::available().into_iter().skip(1) {
            data.compare(group, exec.with_simd(simd), 1, simd);
        }
    }
}

struct Data {
    p: Buffer<f32>,
    m: Buffer<f32>,
    v: Buffer<f32>,
    w: Buffer<f32>,
    grad: Buffer<Bf16>,
    out: Buffer<Bf16>,
    half: Buffer<F16>,
    wide: Buffer<Bf16>,
    tiny: Buffer<F16>,
    rest: Buffer<u16>,
    first: Buffer<Bf16>,
    second: Buffer<Bf16>,
    codes: Buffer<u8>,
    codes_sq: Buffer<u8>,
    absmax: Buffer<f32>,
    absmax_sq: Buffer<f32>,
    up: Buffer<u8>,
    scalars: Scalars,
    rule: Rule,
}

impl Data {
    fn new(len: usize) -> Self {
        let group = Hyperparameters {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            decoupled: true,
            step: 10,
            grad_scale: 0.5,
            maximize: false,
            seed: 0,
        };
        let mut wide = Buffer::new(len, 15, Bf16(0x3C00));
        wide.iter_mut().step_by(100).for_each(|value| *value = Bf16(0x3000));
        Self {
            p: Buffer::new(len, 0, 0.25),
            m: Buffer::new(len, 1, 0.01),
            v: Buffer::new(len, 2, 0.02),
            w: Buffer::new(len, 3, 1.5),
            grad: Buffer::new(len, 4, Bf16(0x3C00)),
            out: Buffer::new(len, 5, Bf16(0)),
            half: Buffer::new(len, 6, F16(0x3C00)),
            wide,
            tiny: Buffer::new(len, 16, F16(0x0155)),
            rest: Buffer::new(len, 7, 0x1234),
            first: Buffer::new(len, 8, Bf16(0x3C00)),
            second: Buffer::new(len, 9, Bf16(0x3C00)),
            codes: Buffer::new(len, 10, 200),
            codes_sq: Buffer::new(len, 11, 200),
            absmax: Buffer::new(len / 256, 12, 0.01),
            absmax_sq: Buffer::new(len / 256, 13, 0.02),
            up: Buffer::new(len / 8, 14, 0),
            rule: group.into(),
            scalars: group.scalars().unwrap_or_else(|error| panic!("{error}")),
        }
    }

    fn compare(&mut self, group: &Group, exec: Exec, threads: usize, simd: Simd) {
        let mut samples = vec![Vec::new(); group.cases.len()];
        for round in 0..=ROUNDS {
            for ((_, case), samples) in group.cases.iter().zip(&mut samples) {
                let began = Instant::now();
                case(self, exec, threads);
                // The first round is a warm-up and does not count.
                if round > 0 {
                    samples.push(began.elapsed().as_secs_f64());
                }
            }
        }
        let medians = samples.iter_mut().map(|times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        let medians: Vec<f64> = medians.collect();
        for ((name, _), seconds) in group.cases.iter().zip(&medians) {
            #[expect(clippy::cast_precision_loss, reason = "a figure to read")]
            let giga = self.p.len() as f64 / seconds / 1e9;
            #[expect(clippy::cast_precision_loss, reason = "a figure to read")]
            let bytes = giga * group.bytes_per_element as f64;
            let name_of = format!("{simd:?}");
            show(&format!("{name:26}{threads:>9}{name_of:>9}{giga:>9.2}{bytes:>9.1}{:>7.2}", medians[0] / seconds));
        }
    }
}

fn ok(result: Result<()>) {
    result.unwrap_or_else(|error| panic!("{error}"));
}

#[expect(clippy::print_stdout, reason = "a benchmark prints")]
fn show(line: &str) {
    println!("{line}");
}
