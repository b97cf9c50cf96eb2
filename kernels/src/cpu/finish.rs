//! What becomes of a product's sums while they are still in the cache.

use std::ops::Range;

use super::attention::Rows;
use super::exp::exp;
use super::packed::COLUMNS;
use super::{Element, dispatch};

/// The last step of a product.
pub trait Finish: Sync {
    /// Panels that are finished together.
    const PANELS: usize;

    /// Takes `rows` of the [`Self::PANELS`] panels from `panel`: `sums` is `[PANELS][rows][COLUMNS]`.
    ///
    /// # Safety
    /// Rows and panels are inside the output, and nobody else uses these parts of it.
    unsafe fn rows(&self, rows: Range<usize>, panel: usize, sums: &[f32]);
}

/// `y = sums + bias (+ y)`, `[m, n]`.
pub struct Linear<'a> {
    pub y: Rows<f32>,
    pub n: usize,
    pub bias: Option<&'a [f32]>,
    pub add: bool,
}

impl Finish for Linear<'_> {
    const PANELS: usize = 1;

    unsafe fn rows(&self, rows: Range<usize>, panel: usize, sums: &[f32]) {
        let columns = panel * COLUMNS..self.n.min((panel + 1) * COLUMNS);
        let bias = self.bias.map(|bias| &bias[columns.clone()]);
        for (row, sums) in rows.zip(sums.chunks_exact(COLUMNS)) {
            // SAFETY: passed on from the caller.
            let y = unsafe {
                std::slice::from_raw_parts_mut(self.y.0.add(row * self.n + columns.start), columns.len())
            };
            linear_row(&sums[..columns.len()], bias, self.add, y);
        }
    }
}

dispatch! {
    fn linear_row(sums: &[f32], bias: Option<&[f32]>, add: bool, y: &mut [f32]) -> () {
        match (bias, add) {
            (None, false) => y.copy_from_slice(sums),
            (None, true) => y.iter_mut().zip(sums).for_each(|(y, sum)| *y += sum),
            (Some(bias), _) => {
                for ((y, sum), bias) in y.iter_mut().zip(sums).zip(bias) {
                    *y = sum + (bias + if add { *y } else { 0.0 });
                }
            }
        }
    }
}

/// `out = silu(gate) * up`, `[m, n]`: a panel of gates, then the same columns of up.
pub struct SiluMul<E> {
    pub out: Rows<E>,
    pub n: usize,
}

impl<E: Element> Finish for SiluMul<E> {
    const PANELS: usize = 2;

    unsafe fn rows(&self, rows: Range<usize>, panel: usize, sums: &[f32]) {
        let columns = panel / 2 * COLUMNS..self.n.min((panel / 2 + 1) * COLUMNS);
        let (gates, ups) = sums.split_at(rows.len() * COLUMNS);
        for (row, (gate, up)) in rows.zip(gates.chunks_exact(COLUMNS).zip(ups.chunks_exact(COLUMNS))) {
            // SAFETY: passed on from the caller.
            let out = unsafe {
                std::slice::from_raw_parts_mut(self.out.0.add(row * self.n + columns.start), columns.len())
            };
            silu_row(gate, up, out);
        }
    }
}

dispatch! {
    /// `out[i] = silu(gate[i]) * up[i]`.
    pub fn silu_row<E: Element>(gate: &[f32], up: &[f32], out: &mut [E]) -> () {
        for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
            *o = E::narrow(g / (1.0 + exp(-g)) * u);
        }
    }
}
