//! Norms, activations and rotations, row by row.

use rayon::prelude::*;

use super::{dispatch, dot};

/// Rows handed to one thread at a time: enough work to pay for the hand-over.
const ROWS: usize = 16;

/// RMSNorm of each row of `width` elements: `x / sqrt(mean(x²) + eps) * weight` (Zhang & Sennrich 2019).
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    assert!(
        x.len() == out.len() && x.len().is_multiple_of(width),
        "rms_norm rows of {width}. This is a bug."
    );
    out.par_chunks_mut(ROWS * width).zip(x.par_chunks(ROWS * width)).for_each(|(out, x)| {
        for (out, x) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            norm_row(x, weight, eps, out);
        }
    });
}

dispatch! {
    fn norm_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> () {
        let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
        for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
            *o = x * scale * w;
        }
    }
}

/// `silu(gate) * up` for rows `[gate | up]` of twice `width` elements.
pub fn silu_mul(gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert!(gate_up.len() == 2 * out.len(), "silu_mul rows of {width}. This is a bug.");
    out.par_chunks_mut(ROWS * width).zip(gate_up.par_chunks(ROWS * 2 * width)).for_each(|(out, rows)| {
        for (out, row) in out.chunks_exact_mut(width).zip(rows.chunks_exact(2 * width)) {
            let (gate, up) = row.split_at(width);
            for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
                *o = g / (1.0 + (-g).exp()) * u;
            }
        }
    });
}

/// Rotary embedding in place (Su et al. 2021, the half-split form of GPT-NeoX): rows of `heads` heads, each of
/// `2 * half` elements; `cos`/`sin` hold `half` values for each position.
pub fn rope(x: &mut [f32], positions: &[u32], cos: &[f32], sin: &[f32], (heads, half): (usize, usize)) {
    let row = heads * 2 * half;
    assert!(x.len() == positions.len() * row, "rope rows of {row}. This is a bug.");
    x.par_chunks_mut(ROWS * row).zip(positions.par_chunks(ROWS)).for_each(|(x, positions)| {
        for (row, &position) in x.chunks_exact_mut(row).zip(positions) {
            let at = position as usize * half;
            let (cos, sin) = (&cos[at..at + half], &sin[at..at + half]);
            row.chunks_exact_mut(2 * half).for_each(|head| rotate(head, cos, sin));
        }
    });
}

dispatch! {
    fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) -> () {
        let (low, high) = head.split_at_mut(cos.len());
        for (((l, h), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            (*l, *h) = (*l * c - *h * s, *h * c + *l * s);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_norm_of_equal_elements_is_the_weight() {
        let mut out = [0.0; 6];
        rms_norm(&[2.0, 2.0, 2.0, -3.0, -3.0, -3.0], &[1.0, 0.5, 2.0], 0.0, &mut out);
        assert_eq!(out, [1.0, 0.5, 2.0, -1.0, -0.5, -2.0]);
    }

    #[test]
    fn silu_of_extremes_is_finite() {
        let mut out = [f32::NAN; 3];
        silu_mul(&[-200.0, 0.0, 200.0, 1.0, 1.0, 1.0], 3, &mut out);
        assert_eq!((out[0], out[1], out[2]), (0.0, 0.0, 200.0));
    }

    #[test]
    fn a_quarter_turn_swaps_the_halves() {
        let mut x = [1.0, 2.0, 3.0, 4.0];
        rope(&mut x, &[1], &[1.0, 1.0, 0.0, 0.0], &[0.0, 0.0, 1.0, 1.0], (1, 2));
        assert_eq!(x, [-3.0, -4.0, 1.0, 2.0]);
    }
}
