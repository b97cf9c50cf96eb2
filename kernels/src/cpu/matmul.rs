//! `y = x · Wᵀ (+ bias) (+ y)` with a packed weight, for any number of rows, on any CPU.
//!
//! One row reads each weight once, in order, at the speed of memory. Up to [`FEW_ROWS`] rows do too: a piece of a panel
//! stays in L1 while all rows use it. More rows are blocked so that a block of activations stays in L2 while panels of
//! the weight pass by (Goto & van de Geijn 2008, with the weight packed once at load). Each element is summed over the
//! inputs in order, so a row's result does not depend on how many others there are. Sums are kept in the thread's own
//! cache until they are complete; what becomes of them then ([`Finish`]) is part of the same pass.

use std::cell::RefCell;
use std::ops::Range;

use half::bf16;

use super::attention::{Output, Rows};
use super::finish::{Finish, Linear, SiluMul};
use super::packed::{COLUMNS, Packed, Precision};
use super::tiles::{Ahead, Piece, ROWS, Tiles, Words, floats};
use super::{Element, Isa, dispatch, int8, team};

/// Up to this many rows the weight's bandwidth counts, not arithmetic: it is then read in memory order.
const FEW_ROWS: usize = 4 * ROWS;
/// Words of a piece's column when several tiles of few rows use it: 64 x 256 B = 16 KiB, half of L1.
const FEW_WORDS: usize = 64;
/// Panels of a task: few enough that threads end together, enough that a block is fetched into L2 for good use. Even, so
/// that a gate and its other half are in the same task.
const TASK_PANELS: usize = 4;
/// Tasks for each thread when rows are few: one that lost its core for a moment leaves its share to the others.
const TASKS_PER_THREAD: usize = 12;

/// Activations, `[m, k]` row-major.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl Input<'_> {
    pub fn len(&self) -> usize {
        match self {
            Input::F32(x) => x.len(),
            Input::Bf16(x) => x.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// `y[m, n] = x[m, k] · w[n, k]ᵀ + bias[n]`, plus what `y` held if `add`.
///
/// Where [`Isa::computes_bf16`], f32 activations are rounded to bf16 first; else bf16 ones are widened. Sums are f32.
/// Panics if a slice is not as long as the sizes say or the CPU lacks `isa`, which is a bug of the caller.
pub fn matmul(isa: Isa, x: Input<'_>, w: &Packed, bias: Option<&[f32]>, y: &mut [f32], add: bool) {
    let m = x.len() / w.k();
    assert!(y.len() == m * w.n() && !w.is_gated(), "{m} rows of {}x{}. This is a bug.", w.n(), w.k());
    assert!(bias.is_none_or(|bias| bias.len() == w.n()), "bias of {}. This is a bug.", w.n());
    product(isa, x, w, &Linear { y: Rows(y.as_mut_ptr()), n: w.n(), bias, add });
}

/// `out[m, n / 2] = silu(x · gateᵀ) * (x · upᵀ)` with the two weights in `w`, packed by [`Packed::gated`];
/// `silu(x) = x / (1 + e^-x)`.
///
/// Panics as [`matmul`].
pub fn silu_mul(isa: Isa, x: Input<'_>, w: &Packed, out: Output<'_>) {
    let (m, n) = (x.len() / w.k(), w.n() / 2);
    assert!(out.len() == m * n && w.is_gated(), "{m} rows of {n}x{}. This is a bug.", w.k());
    match out {
        Output::F32(out) => product(isa, x, w, &SiluMul { out: Rows(out.as_mut_ptr()), n }),
        Output::Bf16(out) => product(isa, x, w, &SiluMul { out: Rows(out.as_mut_ptr()), n }),
    }
}

fn product<F: Finish>(isa: Isa, x: Input<'_>, w: &Packed, finish: &F) {
    let m = x.len() / w.k();
    assert!(isa.is_available(), "no {} here. This is a bug.", isa.as_str());
    assert!(x.len() == m * w.k(), "rows of {}. This is a bug.", w.k());
    if m == 0 {
        return;
    }
    with_rows(isa, x, w, |activations| {
        let product = Product { isa, x: activations, w, finish };
        if m <= FEW_ROWS { product.few_rows(m) } else { product.many_rows(m) }
    });
}

/// Rows of words in the form that the tiles want.
#[derive(Clone, Copy)]
struct Activations<'a> {
    words: *const u32,
    row: usize,
    /// Words for each one of a panel's column.
    per_word: usize,
    /// For int8: what a byte of each row stands for.
    factors: &'a [f32],
}

/// Calls `then` with the activations in the form that `isa` computes with. Converts, and pads inputs with zeros, where
/// they are in another.
fn with_rows(isa: Isa, x: Input<'_>, w: &Packed, then: impl FnOnce(Activations<'_>)) {
    thread_local!(static BUFFERS: RefCell<(Words, Vec<f32>)> = RefCell::default());
    let k = w.k();
    let per_word = if w.precision() == Precision::Bf16 { isa.pair_words() } else { 1 };
    let width = w.depth() * per_word;
    // Few rows are read side by side: a power of two apart they would all want the same lines of L1.
    let m = x.len() / k;
    let apart = (2..=FEW_ROWS).contains(&m) && !isa.computes_bf16() && w.precision() == Precision::Bf16;
    let row = width + if apart { 16 } else { 0 };
    // Rows of tiles that straddle cache lines would take twice the time.
    let aligned = |address: usize| isa != Isa::AmxBf16 || address.is_multiple_of(64);
    let as_it_is = |words| Activations { words, row, per_word, factors: &[] };
    match (w.precision(), isa.computes_bf16(), x) {
        (Precision::Bf16, true, Input::Bf16(x)) if k == 2 * row && aligned(x.as_ptr() as usize) => {
            return then(as_it_is(x.as_ptr().cast()));
        }
        (Precision::Bf16, false, Input::F32(x)) if k == width && !apart => {
            return then(as_it_is(x.as_ptr().cast()));
        }
        _ => {}
    }
    BUFFERS.with_borrow_mut(|(words, factors)| {
        let words = words.get(m * row);
        match (w.precision(), isa.computes_bf16()) {
            (Precision::Int8, _) => int8::quantize_rows(x, k, words, row, factors),
            (Precision::Bf16, true) => {
                let (rows, width): (&mut [bf16], usize) = (bytemuck::cast_slice_mut(words), 2 * row);
                match x {
                    Input::F32(x) => copy_rows(x, k, rows, width, narrow),
                    Input::Bf16(x) => copy_rows(x, k, rows, width, |from, to| to.copy_from_slice(from)),
                }
            }
            (Precision::Bf16, false) => match x {
                Input::F32(x) => copy_rows(x, k, floats(words), row, |from, to| to.copy_from_slice(from)),
                Input::Bf16(x) => copy_rows(x, k, floats(words), row, super::widen_into),
            },
        }
        then(Activations { words: words.as_ptr(), row, per_word, factors });
    });
}

fn copy_rows<A, B: bytemuck::Zeroable>(
    from: &[A],
    k: usize,
    to: &mut [B],
    width: usize,
    copy: impl Fn(&[A], &mut [B]),
) {
    for (from, to) in from.chunks_exact(k).zip(to.chunks_exact_mut(width)) {
        copy(from, &mut to[..k]);
        to[k..].fill_with(B::zeroed);
    }
}

dispatch! {
    /// `out[i] = x[i]` rounded to bf16, ties to even.
    pub fn narrow(x: &[f32], out: &mut [bf16]) -> () {
        for (out, x) in out.iter_mut().zip(x) {
            *out = bf16::narrow(*x);
        }
    }
}

/// One product, shared by the threads that compute parts of it.
struct Product<'a, F> {
    isa: Isa,
    x: Activations<'a>,
    w: &'a Packed,
    finish: &'a F,
}

// SAFETY: tasks finish disjoint (row, panel) parts and only read everything else.
unsafe impl<F: Finish> Sync for Product<'_, F> {}

/// Rows, panels and words of a column that are summed in one go.
struct Part {
    rows: Range<usize>,
    panels: Range<usize>,
    words: Range<usize>,
    /// Weights are read in the order of memory.
    in_order: bool,
}

impl<F: Finish> Product<'_, F> {
    fn few_rows(&self, m: usize) {
        let (panels, depth) = (self.w.panels(), self.w.depth());
        // Tiles that take all columns at once read a panel in order; the others return to a piece for its other columns.
        let whole = match self.isa {
            Isa::AmxBf16 => true,
            Isa::Avx512Bf16 => m <= ROWS,
            Isa::Avx512 => m == 1 || m == 4,
            _ => m == 1,
        };
        let step = if whole { depth } else { FEW_WORDS };
        let per_task = panels.div_ceil(team::threads() * TASKS_PER_THREAD).next_multiple_of(F::PANELS);
        self.each_task(panels.div_ceil(per_task), per_task * m, |task, tiles, sums| {
            let range = task * per_task..panels.min((task + 1) * per_task);
            for panel in range.clone() {
                let sums = &mut sums[(panel - range.start) * m * COLUMNS..];
                for word in (0..depth).step_by(step) {
                    let words = word..depth.min(word + step);
                    self.sum(
                        tiles,
                        Part { rows: 0..m, panels: panel..panel + 1, words, in_order: true },
                        sums,
                    );
                }
            }
            self.finish(0..m, range, sums);
        });
    }

    fn many_rows(&self, m: usize) {
        let (panels, depth) = (self.w.panels(), self.w.depth());
        let (block, step) = block(self.isa, m);
        let groups = panels.div_ceil(TASK_PANELS);
        self.each_task(m.div_ceil(block) * groups, TASK_PANELS * block, |task, tiles, sums| {
            let rows = task / groups * block..m.min((task / groups + 1) * block);
            let range = task % groups * TASK_PANELS..panels.min((task % groups + 1) * TASK_PANELS);
            for word in (0..depth).step_by(step) {
                let words = word..depth.min(word + step);
                self.sum(
                    tiles,
                    Part { rows: rows.clone(), panels: range.clone(), words, in_order: false },
                    sums,
                );
            }
            self.finish(rows, range, sums);
        });
    }

    /// Runs tasks, each with tiles and room for `rows` rows of a panel's sums.
    fn each_task(&self, tasks: usize, rows: usize, task: impl Fn(usize, &mut Tiles, &mut [f32]) + Sync) {
        thread_local!(static SUMS: RefCell<Words> = RefCell::default());
        team::run(tasks, |index| {
            SUMS.with_borrow_mut(|sums| {
                // SAFETY: `product` checked the CPU, and a thread is in one task at a time.
                let mut tiles = unsafe { Tiles::new(self.isa) };
                task(index, &mut tiles, floats(sums.get(rows * COLUMNS)));
            });
        });
    }

    /// Adds the part to `sums`, `[panels][rows][COLUMNS]`; the first words start them.
    fn sum(&self, tiles: &mut Tiles, part: Part, sums: &mut [f32]) {
        let Part { rows, panels, words, in_order } = part;
        let size = rows.len() * COLUMNS;
        let (first, last) = (panels.start, panels.end - 1);
        for (panel, sums) in panels.zip(sums.chunks_exact_mut(size)) {
            let at = |panel: usize, word: usize| (panel * self.w.depth() + word) * COLUMNS;
            let b = self.w.words()[at(panel, words.start)..at(panel, words.end)].as_ptr();
            let next = match panel < last {
                true => at(panel + 1, words.start),
                false => at(first, words.end),
            };
            let next = self.w.words().as_ptr().wrapping_add(next);
            let piece = Piece {
                precision: self.w.precision(),
                depth: words.len(),
                a: self.x.words.wrapping_add(rows.start * self.x.row + words.start * self.x.per_word),
                a_row: self.x.row,
                b,
                c: sums.as_mut_ptr().cast(),
                c_row: COLUMNS,
                add: words.start > 0,
                ahead: if in_order { Ahead::Onward } else { Ahead::Piece(next) },
            };
            // SAFETY: rows and words are inside the activations, the panel's words inside the weight (checked above), and
            // the sums have a row for each.
            unsafe { tiles.product(rows.len(), &piece) };
        }
    }

    fn finish(&self, rows: Range<usize>, panels: Range<usize>, sums: &mut [f32]) {
        let size = rows.len() * COLUMNS;
        for (panel, sums) in panels.clone().zip(sums.chunks_exact_mut(size)) {
            let Some(scales) = self.w.scales(panel) else { break };
            for (sums, factor) in sums.chunks_exact_mut(COLUMNS).zip(&self.x.factors[rows.clone()]) {
                int8::dequantize(sums, scales, *factor);
            }
        }
        for (panel, sums) in panels.step_by(F::PANELS).zip(sums.chunks_exact(F::PANELS * size)) {
            // SAFETY: rows and panels are inside the output, and this task's alone.
            unsafe { self.finish.rows(rows.clone(), panel, sums) };
        }
    }
}

/// Rows of a block and words of a piece's columns. Of blocks about equal, with whole tiles.
fn block(isa: Isa, m: usize) -> (usize, usize) {
    let (rows, tile, pairs) = match isa {
        // A piece of a block is 384 KiB and its sums as much, in 2 MiB of L2; the piece of a panel is 64 KiB.
        Isa::AmxBf16 => (384, 32, 256),
        // 192 rows x 1 KiB of f32 are 192 KiB and their sums as much, in 512 KiB of L2; CPUs with AVX-512 have 1 or 2 MiB.
        Isa::Portable | Isa::Avx2 => (192, ROWS, 128),
        Isa::Avx512 => (384, ROWS, 128),
        // 192 rows x 2 KiB of bf16 are 384 KiB, beside a piece of a panel (128 KiB).
        _ => (192, ROWS, 512),
    };
    (m.div_ceil(m.div_ceil(rows)).next_multiple_of(tile), pairs)
}

#[cfg(test)]
mod tests {
    use super::super::arena::Arena;
    use super::*;

    fn values(len: usize, seed: usize) -> Vec<bf16> {
        let mut state = seed as u32;
        let mut value = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| bf16::from_f32(value())).collect()
    }

    /// Sums in f64 of the bf16 inputs, which every path computes with exactly.
    fn check(isa: Isa, (m, n, k): (usize, usize, usize), bias: bool, add: bool, round: bool) {
        let (x, w) = (values(m * k, 1), values(n * k, 2));
        let packed =
            Packed::new(&mut Arena::default(), &[bytemuck::cast_slice(&w)], k, Precision::Bf16).unwrap();
        let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let bias: Option<Vec<f32>> = bias.then(|| (0..n).map(|i| i as f32 / 8.0).collect());
        let mut y = vec![if add { 0.5 } else { f32::NAN }; m * n];
        let input = if round { Input::F32(&wide) } else { Input::Bf16(&x) };
        matmul(isa, input, &packed, bias.as_deref(), &mut y, add);
        for (row, y) in y.chunks_exact(n).enumerate() {
            for (column, y) in y.iter().enumerate() {
                let terms = x[row * k..][..k].iter().zip(&w[column * k..][..k]);
                let (exact, size) = terms.fold((0f64, 1f64), |(sum, size), (x, w)| {
                    let term = x.to_f64() * w.to_f64();
                    (sum + term, size + term.abs())
                });
                let start =
                    bias.as_ref().map_or(0.0, |bias| f64::from(bias[column])) + if add { 0.5 } else { 0.0 };
                let error = (f64::from(*y) - exact - start).abs();
                assert!(error < 1e-6 * size, "{isa:?} {m}x{n}x{k} at {row},{column}: {error:e}");
            }
        }
    }

    #[test]
    fn every_path_agrees_with_f64_for_odd_shapes() {
        for isa in Isa::available() {
            for m in [1, 2, 3, 5, 6, 7, 8, 12, 13, 24, 25, 31, 100] {
                for (n, k) in [(1, 1), (64, 32), (65, 33), (63, 2), (130, 70), (200, 31), (320, 129)] {
                    check(isa, (m, n, k), false, false, true);
                }
            }
            for m in [1, 8, 193, 400] {
                check(isa, (m, 100, 1101), true, false, true);
                check(isa, (m, 128, 2050), false, true, false);
                check(isa, (m, 70, 1030), true, true, false);
            }
        }
    }

    #[test]
    fn a_row_is_the_same_alone_and_among_others() {
        let (n, k) = (192, 1500);
        let (x, w) = (values(300 * k, 3), values(n * k, 4));
        let packed =
            Packed::new(&mut Arena::default(), &[bytemuck::cast_slice(&w)], k, Precision::Bf16).unwrap();
        for isa in Isa::available() {
            let mut alone = vec![0f32; n];
            matmul(isa, Input::Bf16(&x[..k]), &packed, None, &mut alone, false);
            for m in [2, 7, 24, 25, 300] {
                let mut y = vec![0f32; m * n];
                matmul(isa, Input::Bf16(&x[..m * k]), &packed, None, &mut y, false);
                assert_eq!(y[..n], alone, "{isa:?} among {m}");
            }
        }
    }
}
