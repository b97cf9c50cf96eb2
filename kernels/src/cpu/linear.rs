//! `y = x · Wᵀ (+ bias)` with the weight as it is stored: `[out, in]` rows of bf16, f16 or f32.

use std::cell::RefCell;

use gemm::{Parallelism, gemm};
use rayon::prelude::*;

use super::{Element, dot, widen_into};

/// Weight rows widened at a time: 64 x 3,072 x 4 B = 768 KiB stays in a 1 MiB L2 beside the activations.
const PANEL_ROWS: usize = 64;

/// Up to this many activation rows a dot product per weight row beats widening panels for `gemm`.
const DOT_ROWS: usize = 4;

/// `y[m, n] = x[m, k] · w[n, k]ᵀ + bias[n]`, all row-major.
///
/// Panics if a slice is not as long as the sizes say, which is a bug of the caller.
pub fn linear<E: Element>(
    x: &[f32],
    w: &[E],
    bias: Option<&[f32]>,
    y: &mut [f32],
    (m, n, k): (usize, usize, usize),
) {
    assert!(x.len() == m * k && w.len() == n * k && y.len() == m * n, "linear {m}x{n}x{k}. This is a bug.");
    let out = Columns { base: y.as_mut_ptr(), m, n };
    w.par_chunks(PANEL_ROWS * k).enumerate().for_each(|(panel, rows)| {
        let first = panel * PANEL_ROWS;
        if m <= DOT_ROWS { dots(x, rows, k, first, out) } else { panel_gemm(x, rows, k, first, out) }
    });
    if let Some(bias) = bias {
        y.chunks_exact_mut(n).for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
    }
}

/// The output as columns that panels fill side by side.
#[derive(Clone, Copy)]
struct Columns {
    base: *mut f32,
    m: usize,
    n: usize,
}

// SAFETY: each panel writes only its own columns, so no two threads touch the same element.
unsafe impl Send for Columns {}
// SAFETY: as above.
unsafe impl Sync for Columns {}

impl Columns {
    fn set(self, row: usize, column: usize, value: f32) {
        debug_assert!(row < self.m && column < self.n);
        // SAFETY: row and column are inside the output of m x n, by the loop bounds of the callers.
        unsafe { *self.base.add(row * self.n + column) = value };
    }
}

fn dots<E: Element>(x: &[f32], rows: &[E], k: usize, first: usize, out: Columns) {
    for (i, row) in rows.chunks_exact(k).enumerate() {
        for m in 0..out.m {
            out.set(m, first + i, dot(&x[m * k..(m + 1) * k], row));
        }
    }
}

fn panel_gemm<E: Element>(x: &[f32], rows: &[E], k: usize, first: usize, out: Columns) {
    thread_local!(static PANEL: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) });
    PANEL.with_borrow_mut(|panel| {
        panel.resize(rows.len(), 0.0);
        widen_into(rows, panel);
        let n = rows.len() / k;
        // SAFETY: y's columns first..first+n (row stride out.n) belong to this panel alone; x is m x k row-major and
        // the panel, n x k row-major, is read as its transpose; all three are live for the call.
        unsafe {
            gemm(
                out.m,
                n,
                k,
                out.base.add(first),
                1,
                out.n as isize,
                false,
                x.as_ptr(),
                1,
                k as isize,
                panel.as_ptr(),
                k as isize,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_agrees_with_f64() {
        for (m, n, k) in [(1, 1, 1), (1, 65, 33), (4, 64, 32), (5, 63, 70), (17, 130, 96), (64, 200, 8)] {
            let x: Vec<f32> = (0..m * k).map(|i| ((i * 29 % 31) as f32 - 15.0) / 16.0).collect();
            let w: Vec<half::bf16> =
                (0..n * k).map(|i| half::bf16::from_f32(((i * 17 % 37) as f32 - 18.0) / 32.0)).collect();
            let bias: Vec<f32> = (0..n).map(|i| i as f32 / 8.0).collect();
            let mut y = vec![f32::NAN; m * n];
            linear(&x, &w, Some(&bias), &mut y, (m, n, k));
            for row in 0..m {
                for col in 0..n {
                    let exact: f64 = (0..k).map(|i| x[row * k + i] as f64 * w[col * k + i].to_f64()).sum();
                    let got = y[row * n + col] as f64;
                    assert!((got - exact - bias[col] as f64).abs() < 1e-4, "{m}x{n}x{k} at {row},{col}");
                }
            }
        }
    }
}
