//! `y = x · Wᵀ (+ bias) (+ y)` with a packed bf16 weight, for any number of rows, on any CPU.
//!
//! One row reads each weight once, in order, at the speed of memory. Up to [`FEW_ROWS`] rows do too: a piece of a panel
//! stays in L1 while all rows use it. More rows are blocked so that a block of activations stays in L2 while panels of
//! the weight pass by (Goto & van de Geijn 2008, with the weight packed once at load). Each element is summed over the
//! inputs in order, so a row's result does not depend on how many others there are.

use std::cell::RefCell;

use half::bf16;

use super::packed::{COLUMNS, PackedBf16};
use super::{Element, Isa, dispatch, team, widen};

/// Rows of a register tile.
const TILE_ROWS: usize = widen::ROWS;
/// Up to this many rows the weight's bandwidth counts, not arithmetic: it is then read in memory order.
const FEW_ROWS: usize = 4 * TILE_ROWS;
/// Pairs of a piece when several tiles of few rows use it: 64 x 256 B = 16 KiB, half of L1.
const FEW_PAIRS: usize = 64;
/// Rows of a block: 192 x 2 KiB of bf16 is 384 KiB of L2, beside a piece of a panel (128 KiB).
const BLOCK_ROWS: usize = 192;
/// Pairs of a piece otherwise.
const BLOCK_PAIRS: usize = 512;
/// Panels of a task: few enough that threads end together, enough that a block is fetched into L2 for good use.
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
/// On [`Isa::Avx512Bf16`] f32 activations are rounded to bf16 first; else bf16 ones are widened. Sums are f32.
/// Panics if a slice is not as long as the sizes say or the CPU lacks `isa`, which is a bug of the caller.
pub fn matmul(isa: Isa, x: Input<'_>, w: &PackedBf16, bias: Option<&[f32]>, y: &mut [f32], add: bool) {
    let m = x.len() / w.k();
    assert!(isa.is_available(), "no {} here. This is a bug.", isa.as_str());
    assert!(x.len() == m * w.k() && y.len() == m * w.n(), "{m} rows of {}x{}. This is a bug.", w.n(), w.k());
    assert!(bias.is_none_or(|bias| bias.len() == w.n()), "bias of {}. This is a bug.", w.n());
    if m == 0 {
        return;
    }
    with_rows(isa, x, w, |a, a_row, a_pair| {
        let product = Product { isa, a, a_row, a_pair, w, bias, y: y.as_mut_ptr(), add };
        if m <= FEW_ROWS { product.few_rows(m) } else { product.many_rows(m) }
    });
}

/// Calls `then` with the activations as words in the form that `isa` computes with, the distance of rows and of pairs.
/// Converts, and pads an odd `k` with a zero, where they are in another form.
fn with_rows(isa: Isa, x: Input<'_>, w: &PackedBf16, then: impl FnOnce(*const u32, usize, usize)) {
    thread_local!(static WORDS: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) });
    let (k, pairs) = (w.k(), w.pairs());
    match (isa, x) {
        (Isa::Avx512Bf16, Input::Bf16(x)) if k.is_multiple_of(2) => then(x.as_ptr().cast(), pairs, 1),
        (Isa::Portable | Isa::Avx2 | Isa::Avx512, Input::F32(x)) if k.is_multiple_of(2) => {
            then(x.as_ptr().cast(), 2 * pairs, 2);
        }
        (Isa::Avx512Bf16, x) => WORDS.with_borrow_mut(|words| {
            words.clear();
            words.resize(x.len() / k * pairs, 0);
            let rows: &mut [bf16] = bytemuck::cast_slice_mut(words);
            match x {
                Input::F32(x) => copy_rows(x, k, rows, 2 * pairs, narrow),
                Input::Bf16(x) => copy_rows(x, k, rows, 2 * pairs, |from, to| to.copy_from_slice(from)),
            }
            then(words.as_ptr(), pairs, 1);
        }),
        (_, x) => WORDS.with_borrow_mut(|words| {
            words.clear();
            words.resize(x.len() / k * 2 * pairs, 0);
            let rows: &mut [f32] = bytemuck::cast_slice_mut(words);
            match x {
                Input::F32(x) => copy_rows(x, k, rows, 2 * pairs, |from, to| to.copy_from_slice(from)),
                Input::Bf16(x) => copy_rows(x, k, rows, 2 * pairs, super::widen_into),
            }
            then(words.as_ptr(), 2 * pairs, 2);
        }),
    }
}

fn copy_rows<A, B>(from: &[A], k: usize, to: &mut [B], width: usize, copy: impl Fn(&[A], &mut [B])) {
    for (from, to) in from.chunks_exact(k).zip(to.chunks_exact_mut(width)) {
        copy(from, &mut to[..k]);
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
struct Product<'a> {
    isa: Isa,
    a: *const u32,
    a_row: usize,
    a_pair: usize,
    w: &'a PackedBf16,
    bias: Option<&'a [f32]>,
    y: *mut f32,
    add: bool,
}

// SAFETY: tasks write disjoint (row, panel) parts of `y` and only read everything else.
unsafe impl Sync for Product<'_> {}

/// Rows and pairs of a piece of work in one panel.
#[derive(Clone, Copy)]
struct Piece {
    panel: usize,
    row: usize,
    rows: usize,
    pair: usize,
    pairs: usize,
    /// See [`super::dp::Tile::prefetch`].
    prefetch: (usize, usize),
}

impl Product<'_> {
    fn panels(&self) -> usize {
        self.w.n().div_ceil(COLUMNS)
    }

    fn few_rows(&self, m: usize) {
        let (panels, pairs) = (self.panels(), self.w.pairs());
        let tiles = m.div_ceil(TILE_ROWS);
        let tile_rows = m.div_ceil(tiles);
        let step = if tiles == 1 { pairs } else { FEW_PAIRS };
        let per_task = panels.div_ceil(team::threads() * TASKS_PER_THREAD);
        team::run(panels.div_ceil(per_task), |task| {
            for panel in task * per_task..panels.min((task + 1) * per_task) {
                self.set_bias(panel, 0, m);
                for pair in (0..pairs).step_by(step) {
                    for (tile, row) in (0..m).step_by(tile_rows).enumerate() {
                        let (rows, pairs) = (tile_rows.min(m - row), step.min(pairs - pair));
                        let prefetch = (4 * tile / tiles, 4 * (tile + 1) / tiles);
                        self.tile(Piece { panel, row, rows, pair, pairs, prefetch });
                    }
                }
            }
        });
    }

    fn many_rows(&self, m: usize) {
        let (panels, pairs) = (self.panels(), self.w.pairs());
        let block = m.div_ceil(m.div_ceil(BLOCK_ROWS)).next_multiple_of(TILE_ROWS);
        let groups = panels.div_ceil(TASK_PANELS);
        team::run(m.div_ceil(block) * groups, |task| {
            let (first, last) = (task / groups * block, m.min((task / groups + 1) * block));
            let range = task % groups * TASK_PANELS..panels.min((task % groups + 1) * TASK_PANELS);
            range.clone().for_each(|panel| self.set_bias(panel, first, last - first));
            for pair in (0..pairs).step_by(BLOCK_PAIRS) {
                for panel in range.clone() {
                    for row in (first..last).step_by(TILE_ROWS) {
                        let (rows, pairs) = (TILE_ROWS.min(last - row), BLOCK_PAIRS.min(pairs - pair));
                        self.tile(Piece { panel, row, rows, pair, pairs, prefetch: (0, 0) });
                    }
                }
            }
        });
    }

    /// What the sums of a panel start from, if there is a bias.
    fn set_bias(&self, panel: usize, first: usize, rows: usize) {
        let Some(bias) = self.bias else { return };
        let columns = panel * COLUMNS..self.w.n().min((panel + 1) * COLUMNS);
        for row in first..first + rows {
            for column in columns.clone() {
                // SAFETY: row and column are inside y, in the part that is this task's alone.
                let y = unsafe { &mut *self.y.add(row * self.w.n() + column) };
                *y = bias[column] + if self.add { *y } else { 0.0 };
            }
        }
    }

    /// One register tile; through a buffer where the panel is wider than the matrix.
    fn tile(&self, piece: Piece) {
        let n = self.w.n();
        let columns = COLUMNS.min(n - piece.panel * COLUMNS);
        let starts_from_y = piece.pair > 0 || self.add || self.bias.is_some();
        // SAFETY: the first row and column of the piece are inside y.
        let c = unsafe { self.y.add(piece.row * n + piece.panel * COLUMNS) };
        if columns == COLUMNS {
            // SAFETY: the tile of `rows` by 64 is inside y, and this task's alone.
            return unsafe { self.run(piece, c, n, starts_from_y) };
        }
        let mut buffer = [0f32; TILE_ROWS * COLUMNS];
        for (i, line) in buffer.chunks_exact_mut(COLUMNS).take(piece.rows).enumerate() {
            if starts_from_y {
                // SAFETY: `columns` elements of this row are inside y and belong to this task.
                unsafe { c.add(i * n).copy_to_nonoverlapping(line.as_mut_ptr(), columns) };
            }
        }
        // SAFETY: the buffer holds a whole tile.
        unsafe { self.run(piece, buffer.as_mut_ptr(), COLUMNS, starts_from_y) };
        for (i, line) in buffer.chunks_exact(COLUMNS).take(piece.rows).enumerate() {
            // SAFETY: as above.
            unsafe { c.add(i * n).copy_from_nonoverlapping(line.as_ptr(), columns) };
        }
    }

    /// # Safety
    /// `c` holds `piece.rows` rows of 64 sums, `c_row` apart, that nobody else uses.
    unsafe fn run(&self, piece: Piece, c: *mut f32, c_row: usize, add: bool) {
        let first = (piece.panel * self.w.pairs() + piece.pair) * COLUMNS;
        let b = self.w.words()[first..first + piece.pairs * COLUMNS].as_ptr();
        // SAFETY: row and pair are inside the activations.
        let a = unsafe { self.a.add(piece.row * self.a_row + piece.pair * self.a_pair) };
        let wide = widen::Tile { pairs: piece.pairs, a: a.cast(), a_row: self.a_row, b, c, c_row, add };
        // SAFETY: `matmul` checked that the CPU has `isa`; the pieces are inside a, w and c.
        unsafe {
            match self.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 => {
                    use super::dp::{Start, Tile};
                    let start = if add { Start::Output } else { Start::Zero };
                    let (pairs, prefetch) = (piece.pairs, piece.prefetch);
                    let (a_row, a_pair) = (self.a_row, self.a_pair);
                    Tile { pairs, a, a_row, a_pair, b, c, c_row, start, prefetch }.run(piece.rows);
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => wide.avx512(piece.rows),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => wide.avx2(piece.rows),
                _ => wide.portable(piece.rows),
            }
        }
    }
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
        let packed = PackedBf16::new(&mut Arena::default(), &[bytemuck::cast_slice(&w)], k).unwrap();
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
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
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
        let packed = PackedBf16::new(&mut Arena::default(), &[bytemuck::cast_slice(&w)], k).unwrap();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
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
