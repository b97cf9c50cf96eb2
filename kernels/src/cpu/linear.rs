//! `y = x · Wᵀ (+ bias) (+ y)` with the weight as it is stored, `[out, in]` rows of f32 or f16, exact up to f32's rounding.

use std::cell::RefCell;

use gemm::{Parallelism, gemm};

use super::attention::Rows;
use super::{Element, dot, team, widen_into};

/// Weight rows widened at a time: 64 x 3,072 x 4 B = 768 KiB stays in a 1 MiB L2 beside the activations.
const PANEL_ROWS: usize = 64;

/// Up to this many activation rows a dot product per weight row beats widening panels for `gemm`.
const DOT_ROWS: usize = 4;

/// `y[m, n] = x[m, k] · w[n, k]ᵀ + bias[n]`, plus what `y` held if `add`; all row-major.
///
/// Panics if a slice is not as long as the sizes say, which is a bug of the caller.
pub fn linear<E: Element>(
    x: &[f32],
    w: &[E],
    bias: Option<&[f32]>,
    y: &mut [f32],
    (n, k): (usize, usize),
    add: bool,
) {
    let m = x.len() / k;
    assert!(x.len() == m * k && w.len() == n * k && y.len() == m * n, "linear {m}x{n}x{k}. This is a bug.");
    if let Some(bias) = bias {
        let start = |row: &mut [f32]| {
            row.iter_mut().zip(bias).for_each(|(y, bias)| *y = bias + if add { *y } else { 0.0 });
        };
        y.chunks_exact_mut(n).for_each(start);
    }
    let out = Columns { base: Rows(y.as_mut_ptr()), m, n, add: add || bias.is_some() };
    team::run(n.div_ceil(PANEL_ROWS), |panel| {
        let first = panel * PANEL_ROWS;
        let rows = &w[first * k..n.min(first + PANEL_ROWS) * k];
        if m <= DOT_ROWS { dots(x, rows, k, first, &out) } else { panel_gemm(x, rows, k, first, &out) }
    });
}

/// The output as columns that panels fill side by side.
struct Columns {
    base: Rows<f32>,
    m: usize,
    n: usize,
    add: bool,
}

fn dots<E: Element>(x: &[f32], rows: &[E], k: usize, first: usize, out: &Columns) {
    for (i, row) in rows.chunks_exact(k).enumerate() {
        for m in 0..out.m {
            // SAFETY: row `m` and column `first + i` are inside y; each panel writes only its own columns.
            let y = unsafe { &mut *out.base.0.add(m * out.n + first + i) };
            *y = dot(&x[m * k..(m + 1) * k], row) + if out.add { *y } else { 0.0 };
        }
    }
}

fn panel_gemm<E: Element>(x: &[f32], rows: &[E], k: usize, first: usize, out: &Columns) {
    thread_local!(static PANEL: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) });
    PANEL.with_borrow_mut(|panel| {
        panel.resize(rows.len(), 0.0);
        widen_into(rows, panel);
        let (n, stride) = (rows.len() / k, k as isize);
        let read_y = if out.add { 1.0 } else { 0.0 };
        // SAFETY: y's columns first..first+n (row stride out.n) belong to this panel alone; x is m x k row-major and
        // the panel, n x k row-major, is read as its transpose; all three are live for the call.
        unsafe {
            let (y, y_stride) = (out.base.0.add(first), out.n as isize);
            let (x, w) = (x.as_ptr(), panel.as_ptr());
            let none = Parallelism::None;
            gemm(
                out.m, n, k, y, 1, y_stride, out.add, x, 1, stride, w, stride, 1, read_y, 1.0, false, false,
                false, none,
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
            for add in [false, true] {
                let x: Vec<f32> = (0..m * k).map(|i| ((i * 29 % 31) as f32 - 15.0) / 16.0).collect();
                let w: Vec<half::f16> =
                    (0..n * k).map(|i| half::f16::from_f32(((i * 17 % 37) as f32 - 18.0) / 32.0)).collect();
                let bias: Vec<f32> = (0..n).map(|i| i as f32 / 8.0).collect();
                let mut y = vec![if add { 2.0 } else { f32::NAN }; m * n];
                linear(&x, &w, Some(&bias), &mut y, (n, k), add);
                for (i, got) in y.iter().enumerate() {
                    let (row, col) = (i / n, i % n);
                    let product: f64 = (0..k).map(|i| x[row * k + i] as f64 * w[col * k + i].to_f64()).sum();
                    let exact = product + bias[col] as f64 + if add { 2.0 } else { 0.0 };
                    assert!((*got as f64 - exact).abs() < 1e-4, "{m}x{n}x{k} at {row},{col}");
                }
            }
        }
    }
}
