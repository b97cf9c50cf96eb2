//! Norms, activations and table lookups, row by row.

use super::attention::{Output, Rows};
use super::finish::silu_row;
use super::packed::Packed;
use super::{Element, dispatch, dot, team, widen_into};

/// Rows handed to one thread at a time: enough work to pay for the hand-over.
const ROWS: usize = 16;

/// RMSNorm of each row of `width` elements: `x / sqrt(mean(x²) + eps) * weight` (Zhang & Sennrich 2019).
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: Output<'_>) {
    let width = weight.len();
    assert!(
        x.len() == out.len() && x.len().is_multiple_of(width),
        "rms_norm rows of {width}. This is a bug."
    );
    match out {
        Output::F32(out) => each_row(x, width, out, width, |x, out| norm_row(x, weight, eps, out)),
        Output::Bf16(out) => each_row(x, width, out, width, |x, out| norm_row(x, weight, eps, out)),
    }
}

dispatch! {
    fn norm_row<E: Element>(x: &[f32], weight: &[f32], eps: f32, out: &mut [E]) -> () {
        let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
        for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
            *o = E::narrow(x * scale * w);
        }
    }
}

/// `silu(gate) * up` for rows `[gate | up]` of twice `width` elements; `silu(x) = x / (1 + e^-x)`.
pub fn silu_mul(gate_up: &[f32], width: usize, out: Output<'_>) {
    assert!(gate_up.len() == 2 * out.len(), "silu_mul rows of {width}. This is a bug.");
    match out {
        Output::F32(out) => each_row(gate_up, 2 * width, out, width, halves),
        Output::Bf16(out) => each_row(gate_up, 2 * width, out, width, halves),
    }
}

fn halves<E: Element>(row: &[f32], out: &mut [E]) {
    let (gate, up) = row.split_at(out.len());
    silu_row(gate, up, out);
}

/// Rows `ids` of a packed table `[n, k]`, widened, into `out[ids.len(), k]`.
pub fn embed_packed(table: &Packed, ids: &[u32], out: &mut [f32]) {
    let width = table.k();
    assert!(out.len() == ids.len() * width, "embedding rows of {width}. This is a bug.");
    each_row(ids, 1, out, width, |id, out| table.row(id[0] as usize, out));
}

/// The same from rows that lie one after another.
pub fn embed<E: Element>(table: &[E], ids: &[u32], width: usize, out: &mut [f32]) {
    assert!(out.len() == ids.len() * width, "embedding rows of {width}. This is a bug.");
    each_row(ids, 1, out, width, |id, out| widen_into(&table[id[0] as usize * width..][..width], out));
}

/// Calls `row` with each row of `x` and of `out`, on all threads.
fn each_row<A: Sync, B: Send>(
    x: &[A],
    width: usize,
    out: &mut [B],
    out_width: usize,
    row: impl Fn(&[A], &mut [B]) + Sync,
) {
    let rows = x.len() / width;
    assert!(out.len() == rows * out_width, "{rows} rows of {out_width}. This is a bug.");
    let out = Rows(out.as_mut_ptr());
    let out = &out;
    team::run(rows.div_ceil(ROWS), |task| {
        for i in task * ROWS..rows.min((task + 1) * ROWS) {
            // SAFETY: row `i` is inside `out`, checked above, and this task's alone.
            let to = unsafe { std::slice::from_raw_parts_mut(out.0.add(i * out_width), out_width) };
            row(&x[i * width..(i + 1) * width], to);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_norm_of_equal_elements_is_the_weight() {
        let mut out = [0.0; 6];
        rms_norm(&[2.0, 2.0, 2.0, -3.0, -3.0, -3.0], &[1.0, 0.5, 2.0], 0.0, Output::F32(&mut out));
        assert_eq!(out, [1.0, 0.5, 2.0, -1.0, -0.5, -2.0]);
    }

    #[test]
    fn silu_agrees_with_f64_and_its_extremes_are_finite() {
        let mut row: Vec<f32> =
            (0..1000).map(|i| (i - 500) as f32 / 10.0).chain([-200.0, 0.0, 200.0]).collect();
        let gates = row.clone();
        row.extend(std::iter::repeat_n(2.0, gates.len()));
        let mut out = vec![f32::NAN; gates.len()];
        silu_mul(&row, gates.len(), Output::F32(&mut out));
        for (x, y) in gates.iter().zip(&out) {
            let exact = 2.0 * f64::from(*x) / (1.0 + (-f64::from(*x)).exp());
            assert!(
                (f64::from(*y) - exact).abs() <= 2e-6 * exact.abs() + 1e-30,
                "silu({x}) = {y}, not {exact}"
            );
        }
    }
}
