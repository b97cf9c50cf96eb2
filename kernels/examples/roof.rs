//! Each kernel beside the roofs of the machine it runs on: `cargo run --release -p kernels --example roof`
//!
//! Roofs are measured in the same run, between the kernels, with the same threads: what the cores can read from memory, and
//! what they can do in `vdpbf16ps`. On a shared machine only the ratios mean something. Shapes are Qwen3-0.6B's.

use std::time::Instant;

use half::bf16;
use kernels::cpu::team;
use kernels::cpu::{Arena, Attention, Input, Isa, Output, PackedBf16, matmul};
use kernels::{BatchMeta, KvDtype, KvLayout, KvPool};

const RUNS: usize = 40;
const HEADS: usize = 16;
const LAYOUT: KvLayout =
    KvLayout { num_layers: 1, num_kv_heads: 8, head_dim: 128, block_size: 16, dtype: KvDtype::Bf16 };

/// Seconds of the fastest run.
fn best(mut run: impl FnMut()) -> f64 {
    let time = |_| {
        let started = Instant::now();
        run();
        started.elapsed().as_secs_f64()
    };
    (0..RUNS).map(time).fold(f64::INFINITY, f64::min)
}

fn main() {
    println!("{} threads, {}", team::threads(), Isa::detect().as_str());
    let mut arena = Arena::default();
    let mut words = arena.alloc(64 << 20).expect("256 MiB");
    // SAFETY: the words are ours. Untouched ones would all be the same page of zeros.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr(), words.len()) }.fill(1);
    let read = read_roof(&words);
    println!("read                        {read:7.1} GB/s");
    let dot = dot_roof();
    if dot > 0.0 {
        println!("vdpbf16ps                   {dot:7.0} GFLOP/s");
    }
    let (n, k) = (6144, 1024);
    let w = PackedBf16::new(&mut arena, &[bytemuck::cast_slice(&values(n * k))], k).expect("12 MiB");
    let head = PackedBf16::new(&mut arena, &[bytemuck::cast_slice(&values(65_536 * k))], k).expect("128 MiB");
    for isa in Isa::available() {
        for m in [8, 32, 192, 384] {
            report_flops(
                &format!("matmul {m}x{n}x{k} {}", isa.as_str()),
                product(isa, m, &w),
                (2 * m * n * k) as f64,
                dot,
            );
        }
        for m in [1, 8] {
            let bytes = head.bytes() as f64;
            report_bytes(
                &format!("matmul {m}x{}x{k} {}", head.n(), isa.as_str()),
                product(isa, m, &head),
                bytes,
                read,
            );
        }
    }
    for tokens in [512, 1500, 3000] {
        let flops = 2.0 * (tokens * tokens * HEADS * LAYOUT.head_dim) as f64;
        report_flops(&format!("attention, prompt of {tokens}"), attention(&[(0, tokens)]), flops, dot);
    }
    for count in [1, 8] {
        let bytes = (count * 512 * LAYOUT.token_bytes()) as f64;
        report_bytes(&format!("attention, {count} at 512"), attention(&vec![(511, 1); count]), bytes, read);
    }
}

fn report_flops(name: &str, seconds: f64, flops: f64, roof: f64) {
    let rate = flops / seconds / 1e9;
    println!(
        "{name:36} {:9.3} ms {rate:7.0} GFLOP/s {:4.0} % of the bf16 roof",
        seconds * 1e3,
        rate / roof * 100.0
    );
}

fn report_bytes(name: &str, seconds: f64, bytes: f64, roof: f64) {
    let rate = bytes / seconds / 1e9;
    println!(
        "{name:36} {:9.3} ms {rate:7.1} GB/s    {:4.0} % of the read roof",
        seconds * 1e3,
        rate / roof * 100.0
    );
}

fn values(len: usize) -> Vec<bf16> {
    (0..len).map(|i| bf16::from_f32((i * 7919 % 2003) as f32 / 1001.0 - 1.0)).collect()
}

fn product(isa: Isa, m: usize, w: &PackedBf16) -> f64 {
    let (x, mut y) = (values(m * w.k()), vec![0f32; m * w.n()]);
    let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
    let input = if isa.computes_bf16() { Input::Bf16(&x) } else { Input::F32(&wide) };
    best(|| matmul(isa, input, w, None, &mut y, false))
}

/// One layer of sequences of `(tokens before, new tokens)`.
fn attention(seqs: &[(usize, usize)]) -> f64 {
    let (mut meta, mut next) = (BatchMeta::default(), 0u32);
    for &(before, new) in seqs {
        let blocks = (before + new).div_ceil(LAYOUT.block_size) as u32;
        meta.push(&(next..next + blocks).collect::<Vec<u32>>(), before, new, LAYOUT.block_size);
        next += blocks;
    }
    let pool = KvPool::new(LAYOUT, next as usize).expect("a small pool");
    // SAFETY: the pool is this function's, and nobody else has its address.
    let all = unsafe { std::slice::from_raw_parts_mut(pool.base().as_ptr().cast::<bf16>(), pool.len() / 2) };
    all.copy_from_slice(&values(all.len()));
    let q = values(meta.num_tokens() * HEADS * LAYOUT.head_dim);
    let mut out = q.clone();
    let layer = Attention { pool: &pool, layer: 0, meta: &meta, heads: HEADS };
    // SAFETY: as above.
    best(|| unsafe { layer.run(Isa::detect(), Input::Bf16(&q), Output::Bf16(&mut out)) })
}

/// GB/s of all threads reading memory in order.
fn read_roof(words: &[u32]) -> f64 {
    let parts: Vec<&[u32]> = words.chunks(words.len() / 64).collect();
    let seconds = best(|| {
        team::run(parts.len(), |part| {
            let sums = parts[part].chunks_exact(64).fold([0u32; 64], |mut sums, words| {
                sums.iter_mut().zip(words).for_each(|(sum, word)| *sum |= word);
                sums
            });
            std::hint::black_box(sums);
        });
    });
    size_of_val(words) as f64 / seconds / 1e9
}

/// GFLOP/s of all threads in bf16 dot products of registers; 0 where the CPU has none.
fn dot_roof() -> f64 {
    #[cfg(target_arch = "x86_64")]
    if Isa::Avx512Bf16.is_available() {
        const STEPS: usize = 200_000;
        let tasks = 4 * team::threads();
        // SAFETY: the CPU has the instructions.
        let seconds = best(|| team::run(tasks, |_| unsafe { dots(STEPS) }));
        return (tasks * STEPS * 12 * 64) as f64 / seconds / 1e9;
    }
    0.0
}

/// Twelve independent sums, `steps` times: 64 operations each.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dots(steps: usize) {
    use std::arch::x86_64::*;
    // SAFETY: registers of the same size without invalid values.
    let one: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi32(0x3f80_3f80)) };
    let mut sums = [_mm512_setzero_ps(); 12];
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, one, one);
        }
    }
    std::hint::black_box(sums);
}
