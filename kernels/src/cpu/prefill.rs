//! Attention of many query rows over bf16 KV, with bf16 products (AVX512-BF16).
//!
//! A task is one tile: up to 64 *lanes* (query rows x heads of one KV head's group), so that keys and values are read once
//! for the whole group. Everything is computed transposed, lanes across registers and keys down: scores are `K · Qᵀ` with
//! K's rows broadcast straight from the paged cache, softmax statistics of 64 lanes are four registers without any
//! horizontal step, and the output is `Vᵀ · P`. Softmax is online over spans of [`SPAN`] keys (FlashAttention, Dao et
//! al. 2022).

use std::arch::x86_64::*;
use std::cell::RefCell;

use half::bf16;

use super::attention::{Attention, Rows};
use super::dp::{self, Start, Tile};
use super::exp::exp2;
use super::packed::COLUMNS as LANES;
use super::simd::{pair_up, transpose, zip};
use super::team;
use crate::batch::SeqSpan;
use crate::layout::Half;

/// Keys between two updates of the running maximum: 128 x 64 scores are 32 KiB, and the output tile is loaded and stored
/// once for each span. Even, so that pairs of keys start at even positions.
const SPAN: usize = 128;

/// Runs all tiles of `seqs`: those of one KV head together, whose K and V then stay in L2, the longest first.
///
/// # Safety
/// As [`Attention::run`], which checked the lengths, and [`Attention::has_bf16_kernel`]. `out` is as long as `q`.
pub unsafe fn attend(task: &Attention<'_>, q: &[bf16], out: &Rows<bf16>, seqs: &[&SeqSpan]) {
    let rows = LANES / task.group();
    let mut tiles = Vec::new();
    for seq in seqs {
        for kv_head in 0..task.kv_heads() {
            for start in (0..seq.q_len).step_by(rows).rev() {
                tiles.push(Lanes {
                    kv_head,
                    first_row: seq.q_start + start,
                    rows: rows.min(seq.q_len - start),
                    first_context: seq.context_len - seq.q_len + start + 1,
                    table_start: seq.table_start,
                });
            }
        }
    }
    thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::default());
    team::run(tiles.len(), |index| {
        // SAFETY: passed on from the caller; tiles are disjoint in rows and heads.
        SCRATCH.with_borrow_mut(|scratch| unsafe { tiles[index].attend(task, q, out, scratch) });
    });
}

/// Consecutive rows of one sequence, each with the query heads of one KV head: lane `row * group + head`.
struct Lanes {
    kv_head: usize,
    first_row: usize,
    rows: usize,
    /// Tokens that the first row sees, itself included.
    first_context: usize,
    table_start: usize,
}

/// Buffers of one thread, all in L2 together: 128 KiB for heads of 128.
#[derive(Default)]
struct Scratch {
    /// `[head_dim / 2][LANES]` pairs of query elements.
    queries: Vec<u32>,
    /// `[SPAN][LANES]`.
    scores: Vec<f32>,
    /// `[SPAN / 2][LANES]` softmax weights of pairs of keys.
    weights: Vec<u32>,
    /// `[SPAN / 2][head_dim]` value elements of pairs of keys.
    values: Vec<u32>,
    /// `[head_dim][LANES]`.
    output: Vec<f32>,
    /// Largest score of each lane so far, before scaling.
    max: Vec<f32>,
    /// Sum of its weights so far.
    sum: Vec<f32>,
    /// What its output so far is multiplied with in this span.
    keep: Vec<f32>,
}

impl Scratch {
    fn reset(&mut self, dim: usize) {
        self.queries.clear();
        self.queries.resize(dim / 2 * LANES, 0);
        self.scores.resize(SPAN * LANES, 0.0);
        self.weights.resize(SPAN / 2 * LANES, 0);
        self.values.resize(SPAN / 2 * dim, 0);
        self.output.resize(dim * LANES, 0.0);
        for (lanes, value) in
            [(&mut self.max, f32::NEG_INFINITY), (&mut self.sum, 0.0), (&mut self.keep, 0.0)]
        {
            lanes.clear();
            lanes.resize(LANES, value);
        }
    }
}

impl Lanes {
    /// # Safety
    /// As [`attend`].
    unsafe fn attend(&self, task: &Attention<'_>, q: &[bf16], out: &Rows<bf16>, scratch: &mut Scratch) {
        scratch.reset(task.head_dim());
        let context = self.first_context + self.rows - 1;
        // SAFETY: passed on from the caller; the buffers were sized just now, and spans are at most SPAN keys.
        unsafe {
            self.pack_queries(task, q, scratch);
            for first in (0..context).step_by(SPAN) {
                let keys = SPAN.min(context - first);
                self.score(task, first, keys, scratch);
                self.hide_future(task.group(), first, keys, &mut scratch.scores);
                soften(task.head_dim(), keys, scratch);
                self.pair_values(task, first, keys, &mut scratch.values);
                self.sum_values(task.head_dim(), first, keys, scratch);
            }
            self.store(task, scratch, out);
        }
    }

    /// Index in `q` and `out` of the first element of a lane.
    fn at(&self, task: &Attention<'_>, lane: usize) -> usize {
        let (row, head) =
            (self.first_row + lane / task.group(), self.kv_head * task.group() + lane % task.group());
        (row * task.heads + head) * task.head_dim()
    }

    fn pack_queries(&self, task: &Attention<'_>, q: &[bf16], scratch: &mut Scratch) {
        for lane in 0..self.rows * task.group() {
            let (pairs, _) = q[self.at(task, lane)..][..task.head_dim()].as_chunks::<2>();
            for (to, [low, high]) in scratch.queries[lane..].iter_mut().step_by(LANES).zip(pairs) {
                *to = u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
            }
        }
    }

    /// `scores[key][lane] = K[first + key] · Q[lane]`, a run of keys in one block at a time.
    ///
    /// # Safety
    /// As [`attend`].
    unsafe fn score(&self, task: &Attention<'_>, first: usize, keys: usize, scratch: &mut Scratch) {
        let layout = task.pool.layout();
        let mut key = 0;
        while key < keys {
            let in_block = layout.block_size - (first + key) % layout.block_size;
            let rows = in_block.min(keys - key).min(dp::ROWS);
            let tile = Tile {
                pairs: layout.head_dim / 2,
                a: task.token::<bf16>(self.table_start, first + key, Half::Key, self.kv_head).cast(),
                a_row: layout.row() / 2,
                a_pair: 1,
                b: scratch.queries.as_ptr(),
                c: scratch.scores[key * LANES..].as_mut_ptr(),
                c_row: LANES,
                start: Start::Zero,
                prefetch: (0, 0),
            };
            // SAFETY: `rows` keys follow in this block, `layout.row()` elements apart, which nobody writes; the scratch
            // was sized for a span.
            unsafe { tile.run(rows) };
            key += rows;
        }
    }

    /// Keys after a row's own position get no weight: they belong to the last `rows - 1` of the context.
    fn hide_future(&self, group: usize, first: usize, keys: usize, scores: &mut [f32]) {
        for key in self.first_context.saturating_sub(first)..keys {
            let hidden_rows = first + key + 1 - self.first_context;
            scores[key * LANES..][..(hidden_rows * group).min(LANES)].fill(f32::NEG_INFINITY);
        }
    }

    /// `values[pair][i]` = element `i` of the values of both keys of the pair.
    ///
    /// # Safety
    /// As [`attend`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn pair_values(&self, task: &Attention<'_>, first: usize, keys: usize, values: &mut [u32]) {
        let dim = task.head_dim();
        let token = |key| task.token::<bf16>(self.table_start, first + key, Half::Value, self.kv_head);
        for (pair, to) in values.chunks_exact_mut(dim).take(keys.div_ceil(2)).enumerate() {
            // An odd last key is paired with itself; its second weight is zero.
            let (even, odd) = (token(2 * pair), token((2 * pair + 1).min(keys - 1)));
            for i in (0..dim).step_by(32) {
                // SAFETY: 32 elements of a head of `dim`, a multiple of 32, that nobody writes; `to` has `dim` words.
                unsafe {
                    let (low, high) =
                        zip(_mm512_loadu_si512(even.add(i).cast()), _mm512_loadu_si512(odd.add(i).cast()));
                    _mm512_storeu_si512(to.as_mut_ptr().add(i).cast(), low);
                    _mm512_storeu_si512(to.as_mut_ptr().add(i + 16).cast(), high);
                }
            }
        }
    }

    /// `output[i][lane] = output[i][lane] * keep[lane] + sum over keys of V[key][i] * weights[key][lane]`.
    ///
    /// # Safety
    /// As [`attend`].
    unsafe fn sum_values(&self, dim: usize, first: usize, keys: usize, scratch: &mut Scratch) {
        for i in (0..dim).step_by(dp::ROWS) {
            let tile = Tile {
                pairs: keys.div_ceil(2),
                a: scratch.values[i..].as_ptr(),
                a_row: 1,
                a_pair: dim,
                b: scratch.weights.as_ptr(),
                c: scratch.output[i * LANES..].as_mut_ptr(),
                c_row: LANES,
                start: if first == 0 { Start::Zero } else { Start::Scaled(scratch.keep.as_ptr()) },
                prefetch: (0, 0),
            };
            // SAFETY: the scratch was sized for `dim` and a span, and rows from `i` on are at most `dim - i`.
            unsafe { tile.run(dp::ROWS.min(dim - i)) };
        }
    }

    /// Normalises the output and writes it, lanes back to rows.
    ///
    /// # Safety
    /// As [`attend`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn store(&self, task: &Attention<'_>, scratch: &Scratch, out: &Rows<bf16>) {
        let lanes = self.rows * task.group();
        for first_lane in (0..lanes).step_by(16) {
            for i in (0..task.head_dim()).step_by(16) {
                let from = &scratch.output[i * LANES + first_lane..];
                // SAFETY: sixteen lanes of rows `i` to `i + 15` of the output tile, whose width is a multiple of 16.
                let columns = transpose(std::array::from_fn(|j| unsafe {
                    _mm512_loadu_ps(from.as_ptr().add(j * LANES))
                }));
                for (lane, column) in (first_lane..lanes.min(first_lane + 16)).zip(columns) {
                    let value =
                        _mm512_cvtneps_pbh(_mm512_mul_ps(column, _mm512_set1_ps(1.0 / scratch.sum[lane])));
                    // SAFETY: sixteen elements of this lane's head, inside `out`, and no other tile writes them.
                    unsafe { out.0.add(self.at(task, lane) + i).cast::<__m256bh>().write_unaligned(value) };
                }
            }
        }
    }
}

/// Turns scores into pairs of weights, and updates each lane's maximum, sum and `keep`.
///
/// # Safety
/// The CPU has AVX512-BF16; `keys <= SPAN`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn soften(dim: usize, keys: usize, scratch: &mut Scratch) {
    let scale = _mm512_set1_ps(std::f32::consts::LOG2_E / (dim as f32).sqrt());
    for lane in (0..LANES).step_by(16) {
        // SAFETY: keys and lanes are inside the buffers, which `reset` sized: 16 lanes from a multiple of 16.
        unsafe {
            let scores = scratch.scores.as_ptr().add(lane);
            let old = _mm512_loadu_ps(scratch.max.as_ptr().add(lane));
            // Four chains: the latency of one maximum would be four times its cost.
            let mut maxima = [old; 4];
            for key in 0..keys {
                maxima[key % 4] = _mm512_max_ps(maxima[key % 4], _mm512_loadu_ps(scores.add(key * LANES)));
            }
            let max = _mm512_max_ps(_mm512_max_ps(maxima[0], maxima[1]), _mm512_max_ps(maxima[2], maxima[3]));
            let shift = _mm512_mul_ps(max, scale);
            let weight =
                |key: usize| exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores.add(key * LANES)), scale, shift));
            let (mut even_sum, mut odd_sum) = (_mm512_setzero_ps(), _mm512_setzero_ps());
            for key in (0..keys).step_by(2) {
                let even = weight(key);
                let odd = if key + 1 < keys { weight(key + 1) } else { _mm512_setzero_ps() };
                even_sum = _mm512_add_ps(even_sum, even);
                odd_sum = _mm512_add_ps(odd_sum, odd);
                let to = scratch.weights.as_mut_ptr().add(key / 2 * LANES + lane);
                _mm512_storeu_si512(to.cast(), pair_up(even, odd));
            }
            let keep = exp2(_mm512_fmsub_ps(old, scale, shift));
            let sum = _mm512_loadu_ps(scratch.sum.as_ptr().add(lane));
            let sum = _mm512_fmadd_ps(sum, keep, _mm512_add_ps(even_sum, odd_sum));
            _mm512_storeu_ps(scratch.sum.as_mut_ptr().add(lane), sum);
            _mm512_storeu_ps(scratch.keep.as_mut_ptr().add(lane), keep);
            _mm512_storeu_ps(scratch.max.as_mut_ptr().add(lane), max);
        }
    }
}
