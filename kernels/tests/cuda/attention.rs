use half::bf16;
use kernels::cpu::{Attention, Input, Isa, Output};
use kernels::cuda::attention::{Decode, Prefill, Queries, scratch_floats, splits, tiles};
use kernels::cuda::{CudaError, Gpu, PoolView};
use kernels::layout::Half;
use kernels::{BatchMeta, KvLayout, KvPool};

use crate::support::*;

/// One batch: tokens before and in it for each sequence, over blocks that lie in the pool in no order.
pub struct Case {
    pub seqs: Vec<(usize, usize)>,
    pub heads: usize,
    pub layout: KvLayout,
}

pub fn case(seqs: &[(usize, usize)], heads: usize, layout: KvLayout) -> Case {
    Case { seqs: seqs.to_vec(), heads, layout }
}

/// Everything the kernels read, and the exact result.
struct Setup {
    meta: BatchMeta,
    pool: KvPool,
    q: Vec<f64>,
    exact: Vec<f64>,
}

const LAYER: usize = 1;

fn setup(case: &Case) -> Setup {
    let layout = case.layout;
    let needed: usize =
        case.seqs.iter().map(|(before, new)| (before + new).div_ceil(layout.block_size)).sum();
    // One block more than is used, so that a wrong one is not out of bounds at once.
    let pool = KvPool::new(layout, needed + 1).unwrap();
    let mut free: Vec<u32> = (0..needed as u32).collect();
    free.sort_by_key(|block| block.wrapping_mul(2_654_435_761) >> 7);
    let mut meta = BatchMeta::default();
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for (index, &(before, new)) in case.seqs.iter().enumerate() {
        let table: Vec<u32> = free.drain(..(before + new).div_ceil(layout.block_size)).collect();
        meta.push(&table, before, new, layout.block_size);
        for (half, all) in [(Half::Key, &mut keys), (Half::Value, &mut values)] {
            let seed = 100 + 2 * index as u32 + u32::from(half == Half::Value);
            let rows = random((before + new) * layout.row(), seed);
            for (position, row) in rows.chunks_exact(layout.row()).enumerate() {
                let to = pool.half_ptr(table[position / layout.block_size], LAYER, half).cast::<bf16>();
                let at = position % layout.block_size * layout.row();
                for (i, value) in row.iter().enumerate() {
                    // SAFETY: a row of a half of this test's pool.
                    unsafe { *to.add(at + i) = bf16::from_f64(*value) };
                }
            }
            all.push(rows);
        }
    }
    let q = random(meta.num_tokens() * case.heads * layout.head_dim, 1);
    let exact = exact(case, &meta, &q, &keys, &values);
    Setup { meta, pool, q, exact }
}

fn exact(case: &Case, meta: &BatchMeta, q: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>]) -> Vec<f64> {
    let (dim, row, group) = (case.layout.head_dim, case.layout.row(), case.heads / case.layout.num_kv_heads);
    let mut out = Vec::new();
    for (seq, (keys, values)) in meta.seqs.iter().zip(keys.iter().zip(values)) {
        for i in 0..seq.q_len {
            for head in 0..case.heads {
                let q = &q[((seq.q_start + i) * case.heads + head) * dim..][..dim];
                let visible = seq.context_len - seq.q_len + i + 1;
                let at = |token: usize| token * row + head / group * dim;
                let score = |token: usize| -> f64 {
                    let key = &keys[at(token)..][..dim];
                    q.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt()
                };
                let scores: Vec<f64> = (0..visible).map(score).collect();
                let top = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..dim {
                    let value = |(token, weight): (usize, &f64)| weight * values[at(token) + d];
                    out.push(weights.iter().enumerate().map(value).sum::<f64>() / sum);
                }
            }
        }
    }
    out
}

/// The attention of all rows: sequences of one row by the decode kernel, unless everything is to go through prefill's.
fn run(gpu: &Gpu, case: &Case, setup: &Setup, all_prefill: bool) -> Result<Vec<f64>, CudaError> {
    let (meta, layout) = (&setup.meta, case.layout);
    let bytes: Vec<u8> = (0..setup.pool.num_blocks() as u32).flat_map(|b| setup.pool.read_block(b)).collect();
    let (pool, q) = (gpu.buffer_of(&bytes)?, upload_bf16(gpu, &setup.q));
    let out = gpu.alloc(2 * setup.q.len())?;
    let tables = gpu.buffer_of(&meta.block_tables)?;
    let pool = PoolView { view: pool.view(), layout };
    let queries = Queries { q: q.view(), out: out.view(), heads: case.heads, tables: tables.view() };
    let (one, more): (Vec<_>, Vec<_>) = meta.seqs.iter().partition(|seq| seq.q_len == 1 && !all_prefill);
    let ids = |seqs: &[&kernels::SeqSpan], of: &dyn Fn(&kernels::SeqSpan) -> usize| {
        gpu.buffer_of(&seqs.iter().map(|seq| of(seq) as i32).collect::<Vec<_>>())
    };
    if !one.is_empty() {
        let (rows, contexts) = (ids(&one, &|seq| seq.q_start)?, ids(&one, &|seq| seq.context_len)?);
        let starts = ids(&one, &|seq| seq.table_start)?;
        let max_context = one.iter().map(|seq| seq.context_len).max().unwrap_or(1);
        let mut capacity = 0;
        let mut split_starts = Vec::new();
        for seq in &one {
            split_starts.push(capacity as i32);
            capacity += splits(seq.context_len);
        }
        let split_starts = gpu.buffer_of(&split_starts)?;
        let scratch = gpu.alloc(4 * scratch_floats(capacity, case.heads, layout.head_dim))?;
        let decode = Decode {
            count: one.len(),
            rows: rows.view(),
            contexts: contexts.view(),
            table_starts: starts.view(),
            split_starts: split_starts.view(),
            max_context,
            scratch: scratch.view(),
            capacity,
        };
        decode.run(gpu, &queries, &pool, LAYER)?;
    }
    if !more.is_empty() {
        let lengths: Vec<usize> = more.iter().map(|seq| seq.q_len).collect();
        let tiles = tiles(&lengths, case.heads / layout.num_kv_heads);
        let (starts, lengths) = (ids(&more, &|seq| seq.q_start)?, ids(&more, &|seq| seq.q_len)?);
        let (contexts, tables) = (ids(&more, &|seq| seq.context_len)?, ids(&more, &|seq| seq.table_start)?);
        let of_tiles = gpu.buffer_of(&tiles)?;
        let prefill = Prefill {
            tiles: of_tiles.view(),
            num_tiles: tiles.len(),
            starts: starts.view(),
            lengths: lengths.view(),
            contexts: contexts.view(),
            table_starts: tables.view(),
            sequences: more.len(),
        };
        prefill.run(gpu, &queries, &pool, LAYER)?;
    }
    read_bf16(&out)
}

/// The relative error of a case on a device.
pub fn error(gpu: &Gpu, case: &Case, all_prefill: bool) -> Result<f64, CudaError> {
    let setup = setup(case);
    Ok(relative_error(&run(gpu, case, &setup, all_prefill)?, &setup.exact))
}

/// Contexts around splits and tiles; groups of 1 to 7 heads; every head size.
fn cases() -> Vec<Case> {
    vec![
        case(&[(0, 1)], 2, layout(1, 32, 16)),
        case(&[(126, 1), (127, 1), (128, 1), (299, 1)], 4, layout(2, 128, 16)),
        case(&[(5, 1), (700, 1)], 7, layout(1, 64, 16)),
        case(&[(40, 1)], 5, layout(1, 128, 16)),
        case(&[(33, 1), (150, 1)], 6, layout(2, 32, 5)),
        case(&[(0, 40)], 4, layout(2, 128, 16)),
        case(&[(17, 30), (0, 5), (64, 64)], 3, layout(1, 64, 16)),
        case(&[(100, 33), (3, 1)], 6, layout(2, 32, 7)),
        case(&[(0, 130)], 1, layout(1, 64, 32)),
        case(&[(200, 2), (63, 66)], 2, layout(2, 32, 16)),
    ]
}

#[test]
fn attention_agrees_with_f64() {
    on_every_device(|gpu| {
        for case in cases() {
            let error = error(gpu, &case, false).unwrap();
            assert!(error <= BF16, "{:?} {:?}: {error:.2e}", case.seqs, case.layout);
        }
    });
}

#[test]
fn decode_and_prefill_kernels_agree_on_one_row() {
    on_every_device(|gpu| {
        for case in cases().into_iter().filter(|case| case.seqs.iter().all(|seq| seq.1 == 1)) {
            let error = error(gpu, &case, true).unwrap();
            assert!(error <= BF16, "{:?} {:?}: {error:.2e}", case.seqs, case.layout);
        }
    });
}

#[test]
fn the_gpu_agrees_with_the_cpu_kernels() {
    on_every_device(|gpu| {
        for case in cases() {
            let setup = setup(&case);
            let attention =
                Attention { pool: &setup.pool, layer: LAYER, meta: &setup.meta, heads: case.heads };
            let mut cpu = vec![f32::NAN; setup.q.len()];
            // SAFETY: the pool is this test's.
            unsafe { attention.run(Isa::detect(), Input::F32(&f32s(&setup.q)), Output::F32(&mut cpu)) };
            let cpu: Vec<f64> = cpu.iter().map(|value| f64::from(*value)).collect();
            let gpu = run(gpu, &case, &setup, false).unwrap();
            assert_close(&gpu, &cpu, BF16, &format!("{:?}", case.seqs));
        }
    });
}

#[test]
fn a_rows_attention_does_not_depend_on_its_batch() {
    on_every_device(|gpu| {
        let layout = layout(2, 64, 16);
        let (alone, together) =
            (case(&[(290, 1)], 4, layout), case(&[(290, 1), (700, 1), (3, 1)], 4, layout));
        let (alone_setup, mut together_setup) = (setup(&alone), setup(&together));
        let row = alone_setup.q.len();
        together_setup.q[..row].copy_from_slice(&alone_setup.q);
        let first = run(gpu, &together, &together_setup, false).unwrap()[..row].to_vec();
        assert_eq!(run(gpu, &alone, &alone_setup, false).unwrap(), first);
    });
}

#[test]
fn heads_without_a_kernel_are_refused_by_value() {
    on_every_device(|gpu| {
        let case = case(&[(3, 1)], 2, layout(1, 48, 16));
        let message = error(gpu, &case, false).unwrap_err().to_string();
        assert_eq!(message, "the CUDA kernels do not support head_dim 48, expected 32, 64 or 128");
    });
}
